"""The data pipeline: PySpark jobs that archive closed messages, reconcile ledgers with the center, and report.

It only reads the center's databases (the center's retention duty removes what was archived) and runs in an environment
of its own: `pip install "tmc-center[pipeline]"`. docs/pipeline.md shows each command.
"""
