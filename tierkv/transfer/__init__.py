"""Copies between device blocks and the host region, asynchronously.

``plan`` says what to copy, ``engine`` is the interface and its checks, ``cpu`` and ``cuda`` do it.
"""
