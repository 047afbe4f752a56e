"""What settings mean: the advice of `penstock doctor`, from facts alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import findings
from penstock.cli.findings import Finding

GOOD = {
    "redis_version": "7.2.4",
    "valkey_version": "8.1.1",
    "role": "master",
    "loading": "0",
    "used_memory": "1048576",
    "total_system_memory": str(64 << 30),
    "config:maxmemory": str(8 << 30),
    "config:maxmemory-policy": "allkeys-lru",
    "config:save": "",
    "config:appendonly": "no",
    "config:io-threads": "4",
    "config:proto-max-bulk-len": str(512 << 20),
}


def server(facts: dict[str, str]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings.of_server({**GOOD, **facts})}


def test_a_server_set_up_for_kv_needs_nothing() -> None:
    found = server({})
    assert {finding.level for finding in found.values()} == {"ok"}
    assert not any(finding.advice for finding in found.values())
    assert found["server"].message == "Valkey 8.1.1, standalone"


@pytest.mark.parametrize(
    ("facts", "check", "level", "advice"),
    [
        ({"config:maxmemory": "0"}, "memory", "warn", "CONFIG SET maxmemory 49152mb"),
        (
            {"config:maxmemory-policy": "noeviction"},
            "eviction",
            "warn",
            "CONFIG SET maxmemory-policy allkeys-lru",
        ),
        (
            {"config:maxmemory-policy": "volatile-lru"},
            "eviction",
            "warn",
            "CONFIG SET maxmemory-policy allkeys-lru",
        ),
        (
            {"config:maxmemory-policy": "noeviction", "used_memory": str(9 << 30)},
            "eviction",
            "fail",
            "CONFIG SET maxmemory-policy allkeys-lru",
        ),
        (
            {"config:maxmemory-policy": "allkeys-lru | noeviction"},
            "eviction",
            "warn",
            "CONFIG SET maxmemory-policy allkeys-lru",
        ),
        ({"config:save": "3600 1 300 100"}, "snapshots", "warn", 'CONFIG SET save ""'),
        ({"config:appendonly": "yes"}, "append-only file", "warn", "CONFIG SET appendonly no"),
        ({"config:io-threads": "1"}, "io-threads", "note", "io-threads 4"),
        ({"config:proto-max-bulk-len": "1048576"}, "value size", "warn", "proto-max-bulk-len"),
        ({"loading": "1"}, "state", "fail", "wait"),
        (
            {"role": "slave", "master_host": "primary", "master_port": "6379"},
            "state",
            "fail",
            "primary:6379",
        ),
    ],
)
def test_what_to_change(facts: dict[str, str], check: str, level: str, advice: str) -> None:
    found = server(facts)
    assert found[check].level == level
    assert advice in found[check].advice
    others = {finding.level for name, finding in found.items() if name != check}
    assert others == {"ok"}


def test_a_server_that_hides_its_settings_is_judged_by_what_it_shows() -> None:
    facts = {name: value for name, value in GOOD.items() if not name.startswith("config:")}
    facts |= {"maxmemory": "0", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
    found = {finding.check: finding.level for finding in findings.of_server(facts)}
    assert found["settings"] == "note"
    assert found["memory"] == found["eviction"] == found["append-only file"] == "warn"


@pytest.mark.parametrize(
    ("url", "levels"),
    [
        ("valkey://cache.example:6379", ["warn"]),
        ("redis://10.1.2.3", ["warn"]),
        ("valkey://127.0.0.1:6379", ["note"]),
        ("valkey://[::1]:6379", ["note"]),
        ("redis://localhost", ["note"]),
        ("valkey+cluster://10.1.2.3:1,127.0.0.1:2", ["warn"]),
        ("redis+sentinel://cache.example/main", ["warn"]),
        ("redis+cluster://127.0.0.1:1,[::1]:2", []),
        ("valkeys+cluster://10.1.2.3", []),
        ("redis+unix:///run/redis.sock", []),
        ("unix:///run/valkey.sock", []),
        ("file:///var/cache/penstock", []),
        ("shm://pool?size=1GiB", []),
    ],
)
def test_the_way_to_the_server(url: str, levels: list[str]) -> None:
    assert [finding.level for finding in findings.of_url(url)] == levels


def test_shared_memory_is_taken_until_its_file_is_removed(tmp_path: Path) -> None:
    segment = tmp_path / "penstock-pool"
    segment.touch(mode=0o600)
    facts = {"path": str(segment), "size_bytes": str(1 << 30), "capacity_bytes": str(1000 << 20)}
    found = {
        finding.check: finding
        for finding in findings.of_shared_memory({**facts, "used_bytes": "0"})
    }
    assert found["permissions"].level == found["capacity"].level == "ok"
    assert found["memory"].level == "note"
    assert f"rm {segment}" in found["memory"].advice


class TestDirectory:
    def found(self, path: Path, **facts: int) -> dict[str, Finding]:
        sizes = {"capacity_bytes": 1 << 30, "used_bytes": 0, "disk_free_bytes": 1 << 40, **facts}
        reported = {name: str(size) for name, size in sizes.items()}
        reported |= {"path": str(path), "hosts": "one"}
        return {finding.check: finding for finding in findings.of_directory(reported)}

    def test_a_private_directory_with_room(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        found = self.found(tmp_path)
        assert found["permissions"].level == found["capacity"].level == "ok"
        assert "free space" not in found

    def test_a_disk_that_fills_before_the_pool(self, tmp_path: Path) -> None:
        found = self.found(tmp_path, disk_free_bytes=100 << 20, used_bytes=100 << 20)
        assert found["free space"].level == "warn"
        assert "180MiB" in found["free space"].advice

    def test_prompts_are_not_for_everybody(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        found = self.found(tmp_path)
        assert found["permissions"].level == "warn"
        assert "chmod o-rwx" in found["permissions"].advice

    @pytest.mark.parametrize(
        ("kind", "level"),
        [("ext4", "ok"), ("tmpfs", "note"), ("overlay", "note"), ("nfs4", "warn"), ("", "ok")],
    )
    def test_file_systems(self, kind: str, level: str) -> None:
        (found,) = findings._filesystem(findings.Mount(kind, frozenset()), is_shared=False)
        assert found.level == level

    @pytest.mark.parametrize(
        ("kind", "options", "levels"),
        [
            ("nfs4", {"rw", "hard"}, ["ok", "warn"]),
            ("nfs4", {"rw", "softerr"}, ["ok"]),
            ("lustre", {"rw"}, ["ok"]),
            ("fuse.sshfs", {"rw"}, ["ok"]),
            ("ext4", {"rw"}, ["note"]),
        ],
    )
    def test_directories_of_several_hosts(
        self, kind: str, options: set[str], levels: list[str]
    ) -> None:
        found = findings._filesystem(findings.Mount(kind, frozenset(options)), is_shared=True)
        assert [each.level for each in found] == levels

    def test_the_innermost_mount_counts(self, tmp_path: Path) -> None:
        table = tmp_path / "mountinfo"
        deep = tmp_path / "a b" / "pool"
        deep.mkdir(parents=True)
        escaped = str(deep.parent).replace(" ", "\\040")
        table.write_text(
            "21 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
            f"30 21 0:30 / {escaped} rw,noatime shared:2 - nfs4 host:/pool rw,soft\n"
            f"31 21 0:31 / {tmp_path}/other rw - tmpfs tmpfs rw\n"
        )
        assert findings.mount_of(deep, table) == ("nfs4", {"rw", "noatime", "soft"})
        assert findings.mount_of(tmp_path, table).kind == "ext4"
        assert findings.mount_of(tmp_path, tmp_path / "absent") == ("", set())


def test_a_bucket_without_a_rule_grows_without_end() -> None:
    url = "s3://kv/prod?endpoint=http%3A%2F%2F127.0.0.1%3A9000"

    def levels(facts: dict[str, str], url: str = url) -> dict[str, str]:
        return {each.check: each.level for each in findings.of_object_store(url, facts)}

    good = {"expire_days": "7", "parts_days": "1", "damaged_packs": "0"}
    assert levels(good) == {"expiry": "ok", "round trip": "note"}
    assert levels({**good, "expire_days": "never"})["expiry"] == "warn"
    assert levels({**good, "parts_days": "never"})["unfinished uploads"] == "note"
    assert levels({**good, "damaged_packs": "2"})["packs"] == "warn"
    assert levels({})["expiry"] == "note"
    assert levels(good, "s3://kv?endpoint=http%3A%2F%2F10.0.0.7")["encryption"] == "warn"
    assert "encryption" not in levels(good, "s3://kv/prod")


def test_a_pool_far_away_is_told() -> None:
    near, far, too_far = map(findings.of_round_trip, (0.001, 0.24, 0.6))
    assert (near.level, near.advice) == ("ok", "")
    assert far.level == "note"
    assert "wait 0.96 s" in far.message
    assert too_far.level == "warn"
    assert "penstock.lookup_timeout=3" in too_far.advice
