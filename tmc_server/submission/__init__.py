"""Prepare, submit, roll back and publish through the queues of a broker."""
