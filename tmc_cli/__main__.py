"""python -m tmc_cli: the same as `tmc`."""

from tmc_cli import main

main()
