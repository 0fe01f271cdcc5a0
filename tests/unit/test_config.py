from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ec_s3.config import ECConfig
from ec_s3.errors import ConfigError
from ec_s3.sources import parse_duration, parse_rate, parse_size, parse_switch, parse_tags
from ec_s3.url import DirectoryLocation, S3Location

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_")):
            monkeypatch.delenv(name)


def make(**arguments: Any) -> ECConfig:
    return ECConfig(**arguments)


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


class TestDefaults:
    def test_nothing_set_means_host_memory_only(self) -> None:
        config = ECConfig()
        assert config.location() is None
        assert config.local_disk is None
        assert config.max_local_cpu_size == GIB
        assert config.source("url") == "default"

    def test_a_disk_path_alone_implies_64_gib(self, tmp_path: Path) -> None:
        config = ECConfig(local_disk=str(tmp_path))
        assert (config.local_disk, config.max_local_disk_size) == (tmp_path, 64 * GIB)

    def test_every_setting_has_a_description(self) -> None:
        fields = ECConfig.model_fields
        assert [name for name, field in fields.items() if not field.description] == []

    def test_url_becomes_a_location(self) -> None:
        assert make(url="s3://bucket/p").location() == S3Location("bucket", "p")
        assert make(url="file:///srv/ec").location() == DirectoryLocation("/srv/ec")

    def test_s3_options_carry_the_settings(self) -> None:
        options = make(
            sse="aws:kms", sse_kms_key_id="k1", tags={"team": "ml"}, read_timeout="250ms"
        ).s3_options()
        assert (options.sse, options.sse_kms_key_id) == ("aws:kms", "k1")
        assert options.tags == {"team": "ml"}
        assert options.read_timeout == 0.25

    def test_the_transport_is_one_of_two(self) -> None:
        assert make().s3_options().transport == "sdk"
        assert make(s3_transport="direct").s3_options().transport == "direct"
        with pytest.raises(ConfigError, match="s3_transport"):
            make(s3_transport="pigeon")

    def test_more_concurrency_than_the_usual_pool_gets_more_connections(self) -> None:
        assert make().s3_options().max_connections == 64
        assert make(max_fetches=100, max_uploads=20).s3_options().max_connections == 120


class TestValues:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (5, 5),
            ("5", 5),
            ("1GB", 10**9),
            ("8GiB", 8 * GIB),
            ("8 gib", 8 * GIB),
            ("8Gi", 8 * GIB),
            ("1.5GiB", 3 * GIB // 2),
            ("512MiB", 512 * MIB),
            ("3kB", 3000),
            ("7B", 7),
            ("2TiB", 2048 * GIB),
        ],
    )
    def test_sizes(self, text: object, expected: int) -> None:
        assert parse_size(text) == expected

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None, "", "8G", "8XB", "-1GiB", "GiB", "8ib"])
    def test_other_sizes_are_refused(self, bad: object) -> None:
        with pytest.raises(ValueError, match="not a size"):
            parse_size(bad)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [(2, 2.0), (0.5, 0.5), ("250ms", 0.25), ("2s", 2.0), ("1h", 3600.0), ("2d", 172800.0)],
    )
    def test_durations(self, text: object, expected: float) -> None:
        assert parse_duration(text) == expected

    @pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True, None, "soon", "1w", ""])
    def test_other_durations_are_refused(self, bad: object) -> None:
        with pytest.raises(ValueError, match="not a duration"):
            parse_duration(bad)

    @pytest.mark.parametrize("long", ["9" * 400, 10**400, 1e10, "12000d"], ids=range(4))
    def test_durations_that_no_clock_can_wait_for_are_refused(self, long: object) -> None:
        with pytest.raises(ConfigError, match=r"blocking_timeout=.*30 years"):
            make(blocking_timeout=long)

    def test_sizes_beyond_floats_are_exact_or_refused(self) -> None:
        assert parse_size("9" * 400 + ".5kB") == int("9" * 400) * 1000 + 500
        with pytest.raises(ConfigError, match="max_item_size="):
            make(max_item_size="9" * 5000)

    def test_rates_may_say_per_second(self) -> None:
        assert parse_rate("50MB/s") == parse_rate("50MB") == 50_000_000
        assert parse_rate(None) is None

    def test_switches(self) -> None:
        assert [parse_switch(word) for word in (True, "yes", "1", "On")] == [True] * 4
        assert [parse_switch(word) for word in (False, "no", "0", "OFF")] == [False] * 4
        with pytest.raises(ValueError, match="true or false"):
            parse_switch("maybe")

    def test_tags_as_pairs_or_json(self) -> None:
        assert parse_tags("team=ml, env=x") == {"team": "ml", "env": "x"}
        assert parse_tags('{"team": "ml"}') == {"team": "ml"}
        with pytest.raises(ConfigError, match="JSON"):
            make(tags="{team")
        with pytest.raises(ConfigError, match="JSON"):
            make(tags='{"x":' * 5_000)

    @pytest.mark.parametrize(
        "tags", ["=x", {"": "x"}, {"x" * 129: ""}, {"x": "y" * 257}, "AWS:x=y"], ids=range(5)
    )
    def test_tags_that_make_s3_refuse_every_object_are_refused_at_once(self, tags: object) -> None:
        with pytest.raises(ConfigError, match=r"tags=.* \(argument\): S3 refuses"):
            make(tags=tags)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_local_cpu_size", "lots"),
            ("max_local_cpu_size", None),
            ("max_fetches", 0),
            ("max_fetches", True),
            ("max_fetches", 1.5),
            ("fetch_timeout", 0),
            ("engine", "fork"),
            ("sse", "none"),
            ("verify", "maybe"),
            ("model", ""),
            ("revision", 1.0),
            ("storage_class", "DEEP_ARCHIVE"),
            ("compression_level", 19),
            ("upload_rate", 0),
            ("local_disk", ""),
            ("tags", {"a": 1}),
            ("url", "redis://host"),
        ],
    )
    def test_a_bad_value_is_an_error_that_names_key_value_and_source(
        self, name: str, value: object
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            make(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name}={value!r} (argument): ")
        assert len(message.partition("): ")[2]) > 10

    @pytest.mark.parametrize("name", ["local_disk", "ca_bundle", "signing_key_file", "config_file"])
    @pytest.mark.parametrize("path", ["~no-such-user/x", "a\0b", "", " "])
    def test_a_path_that_is_none_is_an_error_that_names_it(self, name: str, path: str) -> None:
        with pytest.raises(ConfigError, match=rf"{name}='.*' \(argument\): "):
            make(**{name: path})

    def test_a_value_that_grows_out_of_a_few_lines_is_not_shown_whole(self, tmp_path: Path) -> None:
        lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 7))]
        path = yaml_file(tmp_path, "\n".join([*lines, "tags: *a6"]))
        with pytest.raises(ConfigError, match="tags=") as caught:
            make(config_file=path)
        assert len(str(caught.value)) < 5_000

    def test_settings_that_contradict_each_other_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"sse_kms_key_id='k' \(argument\): needs sse"):
            make(sse_kms_key_id="k")

    def test_a_size_in_gigabytes_as_lmcache_writes_it_is_explained(self) -> None:
        with pytest.raises(ConfigError, match="write '2GiB'"):
            make(max_local_cpu_size=2)

    def test_all_bad_values_are_named_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"verify=.*; max_uploads="):
            make(verify="maybe", max_uploads="x")

    def test_a_relative_disk_path_is_made_absolute(self) -> None:
        assert make(local_disk="cache").local_disk == Path.cwd() / "cache"
        assert make(local_disk="file:///srv/x").local_disk == Path("/srv/x")


class TestSources:
    def test_arguments_beat_environment_beats_file_beats_lmcache(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = yaml_file(tmp_path, "max_fetches: 3\nmax_uploads: 3\nblocking_timeout: 3s\n")
        monkeypatch.setenv("LMCACHE_EC_BLOCKING_TIMEOUT_SECS", "4")
        monkeypatch.setenv("LMCACHE_EC_MAX_LOCAL_CPU_SIZE", "4")
        monkeypatch.setenv("EC_S3_CONFIG", str(path))
        monkeypatch.setenv("EC_S3_MAX_FETCHES", "2")
        monkeypatch.setenv("EC_S3_SECOND_SIGHT", "true")
        config = ECConfig(max_fetches=1)
        assert config.max_fetches == 1
        assert config.second_sight is True
        assert config.max_uploads == 3
        assert config.blocking_timeout == 3.0
        assert config.max_local_cpu_size == 4 * GIB
        assert config.source("max_fetches") == "argument"
        assert config.source("second_sight") == "environment EC_S3_SECOND_SIGHT"
        assert config.source("max_uploads") == f"file {path}"
        assert config.source("max_local_cpu_size") == "environment LMCACHE_EC_MAX_LOCAL_CPU_SIZE"
        assert config.source("read_timeout") == "default"

    def test_the_error_names_the_environment_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EC_S3_MAX_ITEM_SIZE", "lots")
        with pytest.raises(ConfigError, match=r"max_item_size='lots' \(environment EC_S3_MAX_I"):
            ECConfig()

    def test_an_empty_variable_counts_as_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_URL", "")
        assert ECConfig().url is None

    def test_an_explicit_none_beats_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_URL", "s3://bucket")
        assert ECConfig(url=None).url is None

    @pytest.mark.parametrize(
        "text", ["max_fetches: 7", "ec_max_fetches: 7", "ec: {max_fetches: 7}"]
    )
    def test_yaml_keys_may_be_plain_prefixed_or_nested(self, text: str, tmp_path: Path) -> None:
        assert ECConfig(config_file=yaml_file(tmp_path, text)).max_fetches == 7

    def test_an_empty_file_sets_nothing(self, tmp_path: Path) -> None:
        assert ECConfig(config_file=yaml_file(tmp_path, "")).max_fetches == 16

    @pytest.mark.parametrize("text", ["- a list", "{unclosed", "ec: 5"])
    def test_a_file_that_is_no_map_is_an_error(self, text: str, tmp_path: Path) -> None:
        path = yaml_file(tmp_path, text)
        with pytest.raises(ConfigError, match=str(path)):
            ECConfig(config_file=path)

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            ECConfig(config_file=tmp_path / "absent.yaml")

    def test_a_map_of_arguments_counts_as_arguments(self) -> None:
        config = ECConfig.from_mapping({"url": "s3://bucket", "max_fetches": "5"})
        assert (config.max_fetches, config.source("url")) == (5, "argument")

    def test_source_of_an_unknown_name_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            ECConfig().source("nonsense")


class TestUnknownNames:
    def test_are_logged_with_the_nearest_name_and_dropped(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, logger="ec_s3.complaints"):
            ECConfig.from_mapping({"max_fetchs": 5, "shared_storage_path": "/x"})
        text = caplog.text
        assert "max_fetchs (argument); did you mean max_fetches?" in text
        assert "shared_storage_path (argument)" in text
        assert "/x" not in text

    def test_of_lmcache_lead_to_ours(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="ec_s3.complaints"):
            make(remote_url="s3://bucket")
        assert "did you mean url?" in caplog.text

    def test_are_an_error_when_strict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_STRICT", "true")
        monkeypatch.setenv("EC_S3_MAX_FETCH", "5")
        with pytest.raises(ConfigError, match=r"max_fetch \(environment EC_S3_MAX_FETCH\)"):
            ECConfig()


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        ["access_key", "aws_access_key_id", "secret_key", "aws_secret_access_key", "session_token"],
    )
    def test_credentials_are_refused_everywhere_and_never_shown(
        self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = yaml_file(tmp_path, f"{name}: hunter2\n")
        with pytest.raises(ConfigError, match="AWS chain") as argument:
            make(**{name: "hunter2"})
        with pytest.raises(ConfigError, match="AWS chain") as in_file:
            ECConfig(config_file=file)
        monkeypatch.setenv(f"EC_S3_{name.upper()}", "hunter2")
        with pytest.raises(ConfigError, match="AWS chain") as variable:
            ECConfig()
        for caught in (argument, in_file, variable):
            assert "hunter2" not in str(caught.value)

    def test_credentials_of_an_lmcache_file_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LMCACHE_EC_EXTRA_CONFIG", '{"aws_secret_access_key": "hunter2"}')
        with pytest.raises(ConfigError, match="AWS chain"):
            ECConfig()

    def test_salt_is_hidden(self) -> None:
        config = make(salt="hunter2")
        assert config.salt is not None
        assert config.salt.get_secret_value() == "hunter2"
        assert "hunter2" not in repr(config) + str(config)

    def test_a_bad_salt_is_not_repeated(self) -> None:
        with pytest.raises(ConfigError, match="salt=<hidden>") as caught:
            make(salt=12345)
        assert "12345" not in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            *("s3://key:hunter2@bucket", "s3://bucket?secret=hunter2", "ftp://x?a=hunter2"),
            "s3://bucket?secret=\nhunter2",
        ],
    )
    def test_a_bad_url_does_not_show_what_may_be_a_secret(self, url: str) -> None:
        with pytest.raises(ConfigError, match="url=") as caught:
            make(url=url)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize(
        "text", ["hunter2", "hunter2:" + "9" * 62, f"x:{'9' * 64},x:{'9' * 64}"]
    )
    def test_a_bad_signing_key_is_not_repeated(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "keys"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"signing_key=<hidden> \(argument\)") as argument:
            make(signing_key=text)
        with pytest.raises(ConfigError, match="signing_key=<hidden>") as no_text:
            make(signing_key=[text])
        with pytest.raises(ConfigError, match="signing_key_file=") as in_file:
            make(signing_key_file=path)
        monkeypatch.setenv("EC_S3_SIGNING_KEY", text)
        with pytest.raises(ConfigError, match="environment EC_S3_SIGNING_KEY") as variable:
            ECConfig()
        for caught in (argument, no_text, in_file, variable):
            assert "hunter2" not in str(caught.value)
            assert "9999" not in str(caught.value)

    def test_a_signing_key_is_hidden(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            config = make(signing_key=f"a:{'9' * 64}", unknown=1)
        shown = f"{config!r} {config} {config.model_dump(mode='json')} {config.keyring()!r}"
        shown += f"{config.source('signing_key')} {caplog.text}"
        assert "9999" not in shown


class TestSigningKeys:
    def test_there_are_none_by_default(self) -> None:
        assert ECConfig().keyring() is None

    def test_come_from_an_argument_the_environment_or_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "keys"
        path.write_text(f"# ours\nc:{'3' * 64}\nd:{'4' * 64}\n")
        named = make(signing_key=f"a:{'1' * 64},b:{'2' * 64}").keyring()
        assert named is not None
        assert named.ids == ("a", "b")
        filed = make(signing_key_file=path).keyring()
        assert filed is not None
        assert filed.ids == ("c", "d")
        monkeypatch.setenv("EC_S3_SIGNING_KEY_FILE", str(path))
        from_environment = ECConfig().keyring()
        assert from_environment is not None
        assert from_environment.signer == "c"

    def test_a_file_that_cannot_be_read_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        path = tmp_path / "absent"
        with pytest.raises(ConfigError, match=rf"signing_key_file=.*{path}.*cannot be read"):
            make(signing_key_file=path)
        with pytest.raises(ConfigError, match="cannot be read"):
            make(signing_key_file=tmp_path)

    def test_a_file_that_is_no_text_is_an_error_that_shows_nothing_of_it(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "keys"
        path.write_bytes(bytes(range(128, 256)))
        with pytest.raises(ConfigError, match="key 1 cannot be used"):
            make(signing_key_file=path)

    def test_two_places_are_one_too_many(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"a:{'1' * 64}")
        with pytest.raises(ConfigError, match=r"signing_key=<hidden>.*keep one of the two"):
            make(signing_key=f"a:{'1' * 64}", signing_key_file=path)

    def test_travel_to_a_child(self) -> None:
        config = pickle.loads(pickle.dumps(make(signing_key=f"a:{'1' * 64}")))
        assert config.keyring().ids == ("a",)


class TestValueObject:
    def test_is_frozen(self) -> None:
        with pytest.raises(ValidationError):
            ECConfig().url = "s3://other"  # type: ignore[misc]  # frozen: the point of the test

    def test_travels_to_a_child_with_its_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_URL", "s3://bucket/p")
        frame = pickle.dumps(make(salt="hunter2", tags={"a": "b"}))
        monkeypatch.setenv("EC_S3_URL", "s3://elsewhere")
        config = pickle.loads(frame)
        assert config.url == "s3://bucket/p"
        assert config.source("url") == "environment EC_S3_URL"
        assert config.salt.get_secret_value() == "hunter2"


class TestUpkeep:
    def test_all_of_it_is_off_unless_it_is_wanted(self) -> None:
        config = make()
        assert (config.warm_start, config.object_lifetime, config.audit_fraction) == (0, None, 0.0)
        assert make(**config.model_dump(mode="json")).object_lifetime is None

    def test_sizes_times_and_shares_are_understood(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_AUDIT_FRACTION", "0.25")
        config = make(warm_start="8GiB", object_lifetime="36h")
        assert (config.warm_start, config.object_lifetime) == (8 * GIB, 36 * 3600.0)
        assert config.audit_fraction == 0.25

    @pytest.mark.parametrize(
        "bad",
        [
            {"audit_fraction": 1.01},
            {"audit_fraction": -0.1},
            {"audit_fraction": "nan"},
            {"object_lifetime": 0},
            {"object_lifetime": "a month"},
            {"warm_start": "-1"},
        ],
    )
    def test_others_are_refused_by_name(self, bad: dict[str, object]) -> None:
        (name,) = bad
        with pytest.raises(ConfigError, match=name):
            make(**bad)


class TestLMCache:
    def test_environment_spellings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name, value in {
            "LOCAL_CPU": "True",
            "MAX_LOCAL_CPU_SIZE": "0.5",
            "LOCAL_DISK": f"file://{tmp_path}",
            "MAX_LOCAL_DISK_SIZE": "16",
            "BLOCKING_TIMEOUT_SECS": "7",
        }.items():
            monkeypatch.setenv(f"LMCACHE_EC_{name}", value)
        config = ECConfig(strict=True)
        assert config.max_local_cpu_size == GIB // 2
        assert config.local_disk == tmp_path
        assert config.max_local_disk_size == 16 * GIB
        assert config.blocking_timeout == 7.0

    def test_zero_sizes_mean_the_default_as_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LMCACHE_EC_MAX_LOCAL_CPU_SIZE", "0")
        assert ECConfig().max_local_cpu_size == GIB

    @pytest.mark.parametrize("text", ["ec_max_local_cpu_size: 2", "ec: {max_local_cpu_size: 2}"])
    def test_only_the_encoder_part_of_its_file_counts(
        self, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = yaml_file(tmp_path, f"chunk_size: 256\nmax_local_cpu_size: 100\n{text}\n")
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
        config = ECConfig(strict=True)
        assert config.max_local_cpu_size == 2 * GIB
        assert str(path) in config.source("max_local_cpu_size")

    @pytest.mark.parametrize(
        ("remote", "extra", "expected"),
        [
            (
                "s3://bkt.s3.eu-west-1.amazonaws.com",
                '{"s3_file_prefix": "/p/q/"}',
                S3Location("bkt", "p/q", region="eu-west-1"),
            ),
            (
                "s3://bkt.minio.local:9000/p",
                '{"disable_tls": true, "s3_region": "default"}',
                S3Location("bkt", "p", endpoint="http://minio.local:9000", region="default"),
            ),
            ("s3://bkt", '{"s3_region": "r"}', S3Location("bkt", region="r")),
        ],
    )
    def test_remote_url_and_its_extra_config_become_one_url(
        self, remote: str, extra: str, expected: S3Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LMCACHE_EC_REMOTE_URL", remote)
        monkeypatch.setenv("LMCACHE_EC_EXTRA_CONFIG", extra)
        assert ECConfig(strict=True).location() == expected

    def test_what_has_no_counterpart_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("LMCACHE_EC_EXTRA_CONFIG", '{"s3_num_io_threads": 4}')
        with caplog.at_level(logging.WARNING, logger="ec_s3.complaints"):
            ECConfig()
        assert "extra_config.s3_num_io_threads" in caplog.text

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("MAX_LOCAL_CPU_SIZE", "lots"),
            ("MAX_LOCAL_CPU_SIZE", "1e305"),
            ("EXTRA_CONFIG", "[1]"),
            ("EXTRA_CONFIG", '{"x":' * 5_000),
        ],
    )
    def test_bad_values_name_their_variable(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"LMCACHE_EC_{name}", value)
        with pytest.raises(ConfigError, match=f"environment LMCACHE_EC_{name}"):
            ECConfig()
