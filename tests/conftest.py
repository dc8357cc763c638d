from __future__ import annotations

import os


def pytest_report_header() -> str:
    """Which S3 server tests/s3 uses. (That folder's own conftest is loaded too late to say it.)"""
    if endpoint := os.environ.get("TIERKV_TEST_S3"):
        return f"S3: {endpoint}"
    return "S3: moto, which checks no signatures; TIERKV_TEST_S3 can name another server, see CONTRIBUTING.md"
