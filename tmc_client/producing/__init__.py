"""Producing: blocks around local transactions, their ledger, and the calls behind them."""
