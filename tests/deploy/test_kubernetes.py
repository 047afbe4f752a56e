"""The example for Kubernetes: valid by its schemas, and what it sets is what the programs take."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import yaml

import penstock
from lab.processes import Server, free_port
from penstock._native import parse_size
from penstock.cli.main import make_parser
from penstock.cli.serve import compose
from penstock.vllm.settings import Settings
from tests.docs.test_facts import vllm_options

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.37")
"""Of Kubernetes: the oldest and the newest that the example is checked for."""

CUSTOMIZE = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())


def documents() -> list[dict[str, Any]]:
    """All objects, as they are written."""
    files = [EXAMPLE / name for name in CUSTOMIZE["resources"] if name.endswith(".yaml")]
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [
        each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = named("Deployment", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    assert isinstance(found, dict)
    return found


def deployments() -> list[str]:
    return [each["metadata"]["name"] for each in documents() if each["kind"] == "Deployment"]


def secrets() -> dict[str, dict[str, str]]:
    """What the script makes, by name."""
    return {each["metadata"]["name"]: each["stringData"] for each in _secret_objects()}


def generated() -> dict[str, list[Path]]:
    """ConfigMaps that kustomize makes, with their files."""
    folders = [EXAMPLE, *(EXAMPLE / name for name in CUSTOMIZE["resources"])]
    return {
        each["name"]: [folder / file for file in each["files"]]
        for folder in folders
        if (folder / "kustomization.yaml").exists()
        for each in yaml.safe_load((folder / "kustomization.yaml").read_text())[
            "configMapGenerator"
        ]
    }


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    for each in [*documents(), *_secret_objects()]:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    wrong = named("Deployment", "vllm")
    wrong["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["perodSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="perodSeconds"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def _secret_objects() -> Iterator[dict[str, Any]]:
    made = subprocess.run([EXAMPLE / "secrets.sh"], capture_output=True, text=True, check=True)
    yield from yaml.safe_load_all(made.stdout)


def test_every_file_is_used() -> None:
    known = {EXAMPLE / name for name in CUSTOMIZE["resources"]}
    known |= {file.resolve() for files in generated().values() for file in files}
    known |= {EXAMPLE / name for name in ("kustomization.yaml", "secrets.sh", "users.acl")}
    for folder in (EXAMPLE, DEPLOY / "prometheus", DEPLOY / "grafana"):
        unused = set(folder.iterdir()) - known - {folder / "kustomization.yaml"}
        assert unused == set()
    assert all(file.exists() for file in known)


def test_what_is_mounted_or_read_is_there() -> None:
    passwords = secrets()
    for name in deployments():
        for volume in pod(name)["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in generated()
            if "secret" in volume:
                assert volume["secret"]["secretName"] in passwords
        mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod(name)["volumes"]}
        for mount in container(name)["volumeMounts"]:
            if "subPath" in mount:
                files = [file.name for file in generated()["grafana-provisioning"]]
                assert mount["subPath"] in files
        for variable in container(name).get("env", []):
            if "valueFrom" in variable:
                key = variable["valueFrom"]["secretKeyRef"]
                assert passwords[key["name"]][key["key"]]


@pytest.mark.parametrize("name", deployments())
def test_every_container_has_probes_and_bounds(name: str) -> None:
    spec = container(name)
    assert {"livenessProbe", "readinessProbe"} <= set(spec)
    assert "memory" in spec["resources"]["limits"]
    assert {"cpu", "memory"} <= set(spec["resources"]["requests"])
    assert pod(name)["automountServiceAccountToken"] is False
    # A service of this name sets VLLM_PORT in every pod that has service links.
    assert pod(name)["enableServiceLinks"] is False
    ports = {port["name"] for port in spec["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        for how in ("httpGet", "tcpSocket"):
            asked = spec.get(probe, {}).get(how)
            assert asked is None or asked["port"] in ports
    assert named("Service", name)["spec"]["selector"] == {"app": name}


def server_command() -> tuple[Any, list[str]]:
    """vLLM's container as `penstock serve` reads it: its own options, and those of vLLM."""
    spec = container("vllm")
    program, *arguments = [*spec["command"], *spec["args"]]
    assert program == "penstock"
    parsed, rest = make_parser().parse_known_args(arguments)
    return parsed, rest


def environment(name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(name)["env"] if "value" in each}


def test_the_servers_command_is_one_that_penstock_and_vllm_take() -> None:
    parsed, rest = server_command()
    assert {option.partition("=")[0] for option in rest} - {"--host", "--port"} <= vllm_options()
    assert "--port=8000" in rest
    assert container("vllm")["ports"][0]["containerPort"] == 8000
    settings = {"pool": environment("vllm")["PENSTOCK_POOL"], "host_bytes": parsed.host_bytes}
    launch = compose(parsed.model, settings, rest, environ={})
    given = json.loads(launch.arguments[launch.arguments.index("--kv-transfer-config") + 1])
    read = Settings.parse(given["kv_connector_extra_config"], environment("vllm"))
    assert read.pool == "valkey://engine@valkey:6379"
    memory = container("vllm")["resources"]["limits"]["memory"]
    assert read.host_bytes < parse_size(memory + "B") / 2
    assert pod("vllm")["terminationGracePeriodSeconds"] > 4 * read.drain_timeout


def test_servers_share_a_pool_that_is_there() -> None:
    host, _, port = environment("vllm")["PENSTOCK_POOL"].rpartition("@")[2].partition(":")
    [service_port] = named("Service", host)["spec"]["ports"]
    assert service_port["port"] == int(port)
    assert f"\nport {port}\n" in (EXAMPLE / "valkey.conf").read_text()
    assert named("Deployment", "vllm")["spec"]["replicas"] > 1
    [rule] = named("NetworkPolicy", "valkey")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]


def test_the_pool_is_well_below_the_memory_it_may_take() -> None:
    [bound] = re.findall(r"^maxmemory (\S+)$", (EXAMPLE / "valkey.conf").read_text(), re.M)
    # In Valkey's configuration `gb` are 2**30 bytes.
    pool = parse_size(re.sub("gb$", "GiB", bound))
    limit = parse_size(container("valkey")["resources"]["limits"]["memory"] + "B")
    assert 1.1 * pool < limit


def test_the_images_tag_is_the_version() -> None:
    [image] = CUSTOMIZE["images"]
    assert image["name"] == container("vllm")["image"]
    assert image["newTag"] == penstock.__version__


def test_secrets_are_new_each_time_and_those_of_the_users() -> None:
    first, second = secrets(), secrets()
    assert first != second
    passwords = [*first["pool"].values(), *first["grafana"].values()]
    assert len(set(passwords)) == 3
    assert all(re.fullmatch("[0-9a-f]{48}", each) for each in passwords)
    users = first["pool-users"]["users.acl"]
    assert f"user engine on >{first['pool']['engine-password']} " in users
    assert f"user operator on >{first['pool']['operator-password']} " in users


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A real Valkey with the example's configuration and users: its port, and their passwords."""
    binary = shutil.which("valkey-server")
    if binary is None:
        pytest.skip("valkey-server is not installed (scripts/install-servers.sh installs it)")
    assert container("valkey")["command"] == ["valkey-server", "/etc/valkey/valkey.conf"]
    made, port = secrets(), free_port()
    users = tmp_path / "users.acl"
    users.write_text(made["pool-users"]["users.acl"])
    text = (EXAMPLE / "valkey.conf").read_text()
    text = text.replace("/etc/valkey-users/users.acl", str(users))
    text = re.sub(r"(?m)^port .*", f"port {port}\nbind 127.0.0.1\ndir {tmp_path}", text)
    file = tmp_path / "valkey.conf"
    file.write_text(text)
    server = Server("valkey-server", [binary, str(file)], tmp_path / "valkey.log")
    try:
        server.wait_for_port(port)
        yield port, made["pool"]
    finally:
        server.kill()


def test_the_engines_user_can_use_the_pool_and_no_more(
    valkey: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, passwords = valkey
    monkeypatch.setenv("PENSTOCK_POOL_PASSWORD", passwords["engine-password"])
    url = environment("vllm")["PENSTOCK_POOL"].replace("valkey:6379", f"127.0.0.1:{port}")
    with penstock.open(url) as pool:
        pool.put("a prompt", b"its keys and values")
        assert bytes(pool.get("a prompt")) == b"its keys and values"
    password = passwords["engine-password"]
    with redis.Redis(port=port, username="engine", password=password) as client:
        assert client.touch("penstock:nothing") == 0
        for forbidden in (client.info, client.flushall, lambda: client.get("another")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()
    monkeypatch.delenv("PENSTOCK_POOL_PASSWORD")
    with (
        penstock.open(url.replace("engine@", "")) as stranger,
        pytest.raises(penstock.PenstockError),
    ):
        stranger.put("a prompt", b"its keys and values")


def test_the_operators_user_finds_the_pool_as_it_should_be(
    valkey: tuple[int, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, passwords = valkey
    monkeypatch.setenv("PENSTOCK_POOL_PASSWORD", passwords["operator-password"])
    args = make_parser().parse_args(["doctor", f"valkey://operator@127.0.0.1:{port}"])
    assert args.run(args) == 0
    said = capsys.readouterr().out
    assert "This pool can serve." in said
    assert "✗" not in said
    assert "allkeys-lru" in said


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration() -> None:
    file = DEPLOY / "prometheus/prometheus.yml"
    said = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    [found] = job["dns_sd_configs"]
    service = named("Service", found["names"][0])["spec"]
    # Without an address of its own, the name stands for every server's.
    assert service["clusterIP"] == "None"
    assert service["ports"][0]["port"] == found["port"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    [source] = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert named("Service", host)["spec"]["ports"][0]["port"] == int(port)
    [provider] = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container("grafana")["volumeMounts"]}
    assert provider["options"]["path"] == mounts["dashboards"]


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("kustomize") or shutil.which("kubectl")),
    reason="neither kustomize nor kubectl is installed",
)
def test_kustomize_puts_it_together() -> None:
    """Alone on this machine: nothing asks a cluster."""
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    environment = os.environ | {"KUBECONFIG": os.devnull}
    made = subprocess.run([*program, EXAMPLE], capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    objects = list(yaml.safe_load_all(made.stdout))
    for each in objects:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    maps = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ConfigMap"}
    used = set(re.findall(r"configMap:\n\s+name: (\S+)", made.stdout))
    assert used == set(maps)
    [dashboards] = [each for name, each in maps.items() if name.startswith("grafana-dashboards")]
    assert json.loads(dashboards["data"]["penstock.json"])["uid"] == "penstock"
    version = penstock.__version__
    assert f"image: registry.example/penstock-vllm:{version}\n" in made.stdout
