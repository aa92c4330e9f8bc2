"""Configuration: file, environment, errors a person can act on."""

from __future__ import annotations

import pytest

from tmc_server.config import Config, ConfigError, load
from tmc_server.settings import settings_of


def _file(tmp_path, text: str) -> str:
    path = tmp_path / "tmc.toml"
    path.write_text(text)
    return str(path)


def test_the_environment_wins_over_the_file(tmp_path) -> None:
    path = _file(tmp_path, '[server]\nlisten = "127.0.0.1:1"\n[limits]\nqueue = 7\n')
    loaded = load(path, {"TMC_SERVER__LISTEN": "0.0.0.0:2", "TMC_LIMITS__LANES": "5", "TMC_ADDRESS": "x", "HOME": "/"})
    assert (loaded.server.listen, loaded.limits.queue, loaded.limits.lanes) == ("0.0.0.0:2", 7, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nlistn = 'a:1'", "server.listn: there is no such key; did you mean 'listen'?"),
        ("[limit]\nqueue = 1", "limit: there is no such key; did you mean 'limits'?"),
        ("[limits]\nlanes = 99", "limits.lanes: Input should be less than or equal to 32."),
        ("[server]\nlisten = 'x'", "give host:port, for example 0.0.0.0:50051"),
        ("[log]\nlevel = 'loud'", "log.level: Input should be 'debug', 'info', 'warning' or 'error'."),
        ("[tls]\ncertificate = 'a.pem'", "certificate and key go together"),
        ("[tls]\nbind_apps = true", "bind_apps needs client_authority"),
        ("[[store.shards]]\nurl = 'sqlite://'\nfirst = 0\nlast = 15", "shards must cover 0 to 31, each exactly once"),
        ("[[store.shards]]\nurll = 'sqlite://'", "did you mean 'url'?"),
        ("not toml", "is not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(_file(tmp_path, text), {})
    assert expected in str(caught.value)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read .*missing\.toml"):
        load(str(tmp_path / "missing.toml"), {})


def test_settings_show_no_user_info_of_urls() -> None:
    loaded = load(None, {"TMC_RETENTION__ARCHIVE": "ftp://archiver:hunter2@host:21/tmc"})
    shown = {each.name: each.value for each in settings_of(loaded)}
    assert shown["retention.archive"] == '"ftp://***@host:21/tmc"'


def test_secrets_are_masked() -> None:
    loaded = load(None, {"TMC_STORE__CATALOG": "mariadb+mysqldb://root:hunter2@db/tmc"})
    assert "hunter2" not in repr(loaded)
    with pytest.raises(ConfigError) as caught:
        load(None, {"TMC_STORE__CATALOG": "mariadb://root:hunter2@db/tmc", "TMC_STORE__CHANGE_DELAY_MS": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("hosts", ["db1,", "db1,,db2", "db1, db2", "[::1],[::2]", "db1:1,db2:1", "db1,db1"])
def test_a_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(ValueError, match="several hosts of a database share its port: db1,db2:5432"):
        Config.model_validate({"store": {"catalog": f"postgresql://tmc:secret@{hosts}/tmc"}})


def test_hosts_of_one_database_are_accepted() -> None:
    Config.model_validate({"store": {"catalog": "postgresql://tmc:secret@db-1.example,10.0.0.2:5432/tmc"}})
