"""docker/ and the file for Kubernetes, as far as they can be checked without an engine."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
PACKAGES = re.compile(r"apt-get install --yes --no-install-recommends( [a-z0-9.+-]+)+")
AROUND_PACKAGES = {"apt-get update", "rm -rf /var/lib/apt/lists/*"}
TARGET = re.compile(r"make (\S+)")


def instructions() -> list[tuple[str, str]]:
    """Gives the instructions of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)]


def named(word: str) -> list[str]:
    """Gives what stands behind each instruction of a kind."""
    return [rest for kind, rest in instructions() if kind == word]


def commands() -> list[str]:
    """Gives the commands that a build runs."""
    return [" ".join(one.split()) for rest in named("RUN") for one in rest.split("&&")]


def mpi_job() -> dict[str, Any]:
    """Gives the job of docs/launch.md for Kubernetes."""
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)


def container(role: str) -> dict[str, Any]:
    """Gives the one container of the launcher's or of the workers' pods."""
    (one,) = mpi_job()["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return one


def test_the_base_image_and_tensorflow_are_arguments() -> None:
    assert [rest.split("=")[0] for rest in named("ARG")] == ["BASE", "TENSORFLOW", "HOROVOD"]
    assert named("FROM") == ["${BASE}"]
    defaults = dict(rest.replace('"', "").split("=", 1) for rest in named("ARG"))
    assert COMPOSE["services"]["keys"]["build"]["args"] == {
        name: f"${{{name}:-{value}}}" for name, value in defaults.items()
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in ("TENSORFLOW", "HOROVOD"))


def test_every_copied_path_is_there_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sources = [source for rest in named("COPY") for source in rest.split()[:-1]]
    assert len(sources) == 5
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if any(fnmatch.fnmatch(source, pattern) for pattern in ignored)] == []


def test_every_command_is_a_list_of_packages_or_a_target_of_the_makefile() -> None:
    odd = [one for one in commands() if not (PACKAGES.fullmatch(one) or TARGET.fullmatch(one))]
    assert set(odd) == AROUND_PACKAGES


@pytest.mark.skipif(not (shutil.which("make") and shutil.which("git")), reason="needs make and git")
@pytest.mark.parametrize("tensorflow", ["", "tensorflow[and-cuda]==2.21.0"])
def test_make_finds_all_that_a_target_needs_in_what_was_copied_before_it(tmp_path: Path, tensorflow: str) -> None:
    # what a build without an engine would do, with the rules of make only printed
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if "Makefile" not in listed.stdout.splitlines():
        pytest.skip("needs a checkout of git, to know what belongs to the tree")
    environment = {"PATH": os.defpath, "TENSORFLOW": tensorflow}
    printed = []
    for kind, rest in instructions():
        if kind == "COPY" and not rest.endswith(".conf"):
            *sources, _ = rest.split()
            for path in [one for one in listed.stdout.splitlines() if "." in sources or one in sources]:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, tmp_path / path)
        elif found := TARGET.fullmatch(rest):
            done = subprocess.run(
                [shutil.which("make"), "-n", found[1]], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
    first, everything = printed
    assert ("--constraint" in first) == bool(tensorflow)
    assert tensorflow in first and ".made/packages" in first
    assert "-m hvd_ext build" in everything and "-m hvd_ext install-horovod" in everything


def test_every_image_service_and_volume_is_defined() -> None:
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    assert {one["image"] for one in services.values()} == {services["keys"]["image"]} == {"hvd_ext"}
    build = services["keys"]["build"]
    assert (ROOT / "docker" / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DOCKERFILE
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services)
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(volumes)
        if name != "keys":
            assert (service["hostname"], service["command"]) == (name, ["/usr/sbin/sshd", "-De"])
    assert len(services) == 4


def test_the_commands_of_the_page_name_these_services_and_this_image() -> None:
    page = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    calls = re.findall(r"mpirun -np \d+ -H (\S+)", page)
    assert calls
    for hosts in calls:
        assert [host.split(":")[0] for host in hosts.split(",")] == ["host1", "host2", "host3"]
    assert set(re.findall(r"--tag (\S+)|docker run .*?(hvd_ext)\b", page)) == {("hvd_ext", ""), ("", "hvd_ext")}
    assert set(re.findall(r"--file (docker/\S+)", page)) == {"docker/Dockerfile", "docker/compose.yaml"}


def test_what_sshd_gives_a_rank_is_what_the_image_has() -> None:
    (line,) = re.findall(r"^SetEnv (.*)$", (ROOT / "docker" / "sshd.conf").read_text(encoding="utf-8"), re.MULTILINE)
    given = dict(one.split("=", 1) for one in line.split())
    image = dict(one.split("=", 1) for rest in named("ENV") for one in rest.split())
    programs = given.pop("PATH").split(":")[0]
    assert image.pop("PATH").split(":")[0] == programs == f"{given.pop('OPAL_PREFIX')}/bin"
    assert given == image


def test_the_hosts_of_kubernetes_are_those_of_the_compose_file() -> None:
    job = mpi_job()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert set(spec) <= {"slotsPerWorker", "sshAuthMountPath", "runPolicy", "mpiReplicaSpecs"}
    launcher, worker = container("Launcher"), container("Worker")
    host = COMPOSE["services"]["host1"]
    assert launcher["image"] == worker["image"] == host["image"]
    assert worker["command"] == host["command"]
    assert f"keys:{spec['sshAuthMountPath']}" in host["volumes"]
    ranks = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert launcher["command"][:4] == ["mpirun", "-np", str(ranks), "python"]
    assert (ROOT / launcher["command"][4]).is_file()
    volumes = {one["name"] for one in spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]}
    assert {one["name"] for one in worker["volumeMounts"]} == volumes
    assert [one["mountPath"] for one in worker["volumeMounts"]] == ["/dev/shm"]
