from __future__ import annotations

import json
import os
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from ec_s3 import ECConfig
from ec_s3.cli.app import app
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

LMCACHE = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 2.5
local_disk: "file:///data/lmcache/"
max_local_disk_size: 100
remote_url: "s3://my-bucket.s3.eu-central-1.amazonaws.com"
remote_serde: naive
blocking_timeout_secs: 7
something_else: 1
extra_config:
  s3_region: eu-west-1
  s3_file_prefix: team/cache
  s3_num_io_threads: 320
  aws_secret_access_key: do-not-show-this
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_")):
            monkeypatch.delenv(name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def record(*arguments: str) -> dict[str, Any]:
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture
def lmcache(tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text(LMCACHE)
    return path


class TestShow:
    def test_every_setting_has_a_value_and_a_source(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("EC_S3_MAX_FETCHES", "7")
        (tmp_path / "ec.yaml").write_text("negative_ttl: 2m\n")
        given = ("--url", "s3://b/p", "--config", str(tmp_path / "ec.yaml"))
        found = record(*given, "config")
        assert found["settings"].keys() == found["sources"].keys() == ECConfig.model_fields.keys()
        assert found["sources"]["url"] == "argument"
        assert found["sources"]["max_fetches"] == "environment EC_S3_MAX_FETCHES"
        assert found["sources"]["negative_ttl"] == f"file {tmp_path / 'ec.yaml'}"
        assert found["sources"]["max_uploads"] == "default"
        assert found["settings"]["negative_ttl"] == 120.0

    def test_people_get_a_table(self) -> None:
        result = run("--url", "s3://b/p", "config")
        assert result.exit_code == 0
        assert "s3://b/p" in result.stdout
        assert "1 GiB" in result.stdout

    def test_doctor_shows_the_same_table(self, tmp_path: Path) -> None:
        settings = run("--url", f"file://{tmp_path}", "config").stdout
        assert run("--url", f"file://{tmp_path}", "doctor").stdout.startswith(settings.rstrip())

    @pytest.mark.parametrize("mode", [(), ("--json",)])
    def test_secrets_are_never_shown(
        self, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
    ) -> None:
        monkeypatch.setenv("EC_S3_SALT", "hush-hush-salt")
        monkeypatch.setenv("EC_S3_SIGNING_KEY", f"k1:{'ab' * 32}")
        result = run(*mode, "config")
        assert result.exit_code == 0
        assert "hush-hush-salt" not in result.output
        assert "ab" * 32 not in result.output


class TestFromLMCache:
    def test_the_converted_file_works_and_means_the_same(
        self, lmcache: Path, tmp_path: Path
    ) -> None:
        result = run("config", "from-lmcache", str(lmcache))
        assert result.exit_code == 0
        converted = tmp_path / "ec.yaml"
        converted.write_text(result.stdout)
        config = ECConfig.from_mapping({"config_file": str(converted), "strict": True})
        assert config.max_local_cpu_size == int(2.5 * 2**30)
        assert str(config.local_disk) == "/data/lmcache"
        assert config.max_local_disk_size == 100 << 30
        assert config.blocking_timeout == 7.0
        assert config.url == "s3://my-bucket/team/cache?region=eu-west-1"

    def test_what_is_left_out_is_named_with_its_reason_and_never_its_value(
        self, lmcache: Path
    ) -> None:
        result = run("config", "from-lmcache", str(lmcache))
        assert "left out chunk_size: " in result.stderr
        assert "left out something_else: " in result.stderr
        assert "AWS chain" in result.stderr
        assert "do-not-show-this" not in result.output

    def test_programs_get_settings_and_reasons(self, lmcache: Path) -> None:
        found = record("config", "from-lmcache", str(lmcache))
        assert found["settings"]["max_local_disk_size"] == "100GiB"
        assert found["settings"]["max_local_cpu_size"] == "2560MiB"
        left_out = {"chunk_size", "local_cpu", "remote_serde", "something_else"}
        extra = {"extra_config.s3_num_io_threads", "extra_config.aws_secret_access_key"}
        assert found["dropped"].keys() == left_out | extra

    def test_settings_of_its_encoder_cache_come_first(self, lmcache: Path) -> None:
        with lmcache.open("a") as file:
            file.write("ec_max_local_cpu_size: 1\nec:\n  max_local_disk_size: 3\n")
        found = record("config", "from-lmcache", str(lmcache))["settings"]
        assert (found["max_local_cpu_size"], found["max_local_disk_size"]) == ("1GiB", "3GiB")

    @pytest.mark.parametrize("url", ["redis://:pass-word@host:6379", "lm://host:65432"])
    def test_a_store_of_another_kind_is_left_out(self, url: str, tmp_path: Path) -> None:
        path = tmp_path / "lmcache.yaml"
        path.write_text(f'remote_url: "{url}"\nlocal_disk: null\nmax_local_cpu_size: 0\n')
        result = run("config", "from-lmcache", str(path))
        assert result.exit_code == 0
        assert yaml.safe_load(result.stdout) == {}
        assert "left out remote_url" in result.stderr
        assert "left out local_disk: it is empty" in result.stderr
        assert "pass-word" not in result.output

    @pytest.mark.parametrize(
        "text", ["max_local_cpu_size: much\n", "- a\n", "remote_url: 's3://a?bad=1'\n", "a: [\n"]
    )
    def test_what_cannot_be_converted_is_wrong_usage(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "lmcache.yaml"
        path.write_text(text)
        assert run("config", "from-lmcache", str(path)).exit_code == 2

    @pytest.mark.parametrize(
        "value", ["2026-02-30", "!!timestamp x", "!!bool x", "0b_", "9" * 5000, "[" * 2000]
    )
    def test_a_value_that_is_none_of_its_kind_is_wrong_usage(
        self, value: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "odd.yaml"
        path.write_text(f"a: {value}\n")
        for arguments in (
            ("config", "from-lmcache", str(path)),
            ("--config", str(path), "config"),
            ("--url", f"file://{tmp_path}", "cost", "--prices", str(path)),
        ):
            result = run(*arguments)
            assert result.exit_code == 2, result.output
            assert str(path) in result.stderr

    def test_a_broken_url_is_wrong_usage(self, tmp_path: Path) -> None:
        path = tmp_path / "lmcache.yaml"
        path.write_text('remote_url: "s3://[bucket"\n')
        result = run("config", "from-lmcache", str(path))
        assert result.exit_code == 2
        assert "not a URL" in result.stderr

    @pytest.mark.parametrize("text", ["salt: do-not-show: this\n", "salt: *do-not-show\n"])
    def test_a_file_that_is_no_yaml_is_not_repeated(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "ec.yaml"
        path.write_text(text)
        result = run("--config", str(path), "config")
        assert result.exit_code == 2
        assert "line 1" in result.stderr
        assert "do-not-show" not in result.output
        with pytest.raises(ConfigError) as caught:
            ECConfig(config_file=path)
        assert "do-not-show" not in "".join(traceback.format_exception(caught.value))

    def test_a_missing_file_is_wrong_usage(self, tmp_path: Path) -> None:
        assert run("config", "from-lmcache", str(tmp_path / "none.yaml")).exit_code == 2
