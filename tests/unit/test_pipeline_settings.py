"""pipeline.toml: what is refused."""

from __future__ import annotations

import pytest

from tmc_pipeline.settings import SparkSettings


@pytest.mark.parametrize(
    "name",
    [
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.bucket.archive.secret.key",
        "spark.hadoop.fs.s3a.session.token",
        "spark.hadoop.fs.azure.account.key.here.dfs.core.windows.net",
        "spark.ssl.keyPassword",
        "spark.authenticate.secret",
        "spark.hadoop.fs.azure.sas.fixed.token.here",
        "spark.hadoop.fs.gs.auth.service.account.private.key",
        "spark.hadoop.fs.s3a.server-side-encryption.key",
    ],
)
def test_credentials_are_no_options_of_spark(name: str) -> None:
    with pytest.raises(ValueError, match="list of processes"):
        SparkSettings(options={name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        "spark.hadoop.fs.s3a.endpoint",
        "spark.hadoop.fs.s3a.aws.credentials.provider",
        "spark.hadoop.hadoop.security.credential.provider.path",
        "spark.sql.adaptive.enabled",
    ],
)
def test_other_options_are_taken(name: str) -> None:
    assert SparkSettings(options={name: "x"}).options == {name: "x"}


def test_passwords_for_java_are_no_options_either() -> None:
    with pytest.raises(ValueError, match="list of processes"):
        SparkSettings(options={"spark.driver.extraJavaOptions": "-Djavax.net.ssl.keyStorePassword=x"})
