"""For spark-submit: spark-submit --master spark://host:7077 tmc_pipeline/__main__.py archive --config pipeline.toml"""

from tmc_pipeline.cli import main

main()
