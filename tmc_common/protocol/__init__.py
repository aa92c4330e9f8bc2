"""Generated from protos/ by scripts/generate; do not edit."""
