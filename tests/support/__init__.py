"""Makers of small real inputs for the tests."""
