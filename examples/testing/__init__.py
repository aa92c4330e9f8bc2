"""Unit tests of a service, with the fixture `tmc_center`: `pytest examples/testing`."""
