"""python -m tmc_server.cli: the same as `tmc`."""

from tmc_server.cli import main

main()
