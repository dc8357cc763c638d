from __future__ import annotations

from server import header


def pytest_report_header() -> str:
    """Which S3 server the tests use. (Only the conftest of this folder is loaded in time, and by all of pytest's processes.)"""
    return header()
