"""Builds and runs the native tests, and those of the MPI transport under mpirun.

Of the programs only the exit status counts, since what several ranks print is mixed.
"""

from __future__ import annotations

import re

import pytest

from tests.native import builds
from tests.native.builds import LIBRARIES, built, must_succeed, run

pytestmark = pytest.mark.slow  # the first run builds for minutes

RUN_LIMIT_S = 900
# What may be seen of the engine library: the C ABI, and what the library of the ops calls.
EXPORTS = (
    *("hvd_ext_", "hvd_ext::Engine::", "hvd_ext::Interrupts::", "hvd_ext::TopK", "hvd_ext::Norm", "hvd_ext::Lars"),
    *("hvd_ext::Lamb", "hvd_ext::ApplyUpdates", "hvd_ext::SizeOf(", "hvd_ext::NameOf("),
)


def exported(name: str) -> list[str]:
    """Gives the names that a shared library defines for others."""
    library = LIBRARIES / name
    if not library.is_file():
        pytest.skip(f"{library} is not built")
    lines = must_succeed(["nm", "--dynamic", "--defined-only", "--demangle", str(library)], RUN_LIMIT_S).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def test_the_native_tests_pass():
    builds.run_tests()


def test_the_gpu_kernels_pass_emulated_on_the_host():
    must_succeed([str(built() / "tests" / "gpu" / "hvd_ext_gpu_tests"), "--quiet"], RUN_LIMIT_S)


def test_a_cache_whose_processes_are_killed_at_random_keeps_what_was_finished():
    # 500 kills in 60 s are the long version: build/native-tests/plain/tests/hvd_ext_cache_kills 500 58
    output = must_succeed([str(built() / "tests" / "hvd_ext_cache_kills"), "40", "4"], RUN_LIMIT_S)
    assert "40 kills in" in output


def test_a_filter_that_fits_no_test_is_a_failure():
    code, output = run([str(built() / "tests" / "hvd_ext_native_tests"), "no such test"], RUN_LIMIT_S)
    assert code != 0
    assert "no test has a name that contains 'no such test'" in output


def test_the_engine_library_exports_only_the_c_abi_and_the_engine():
    names = exported("libhvd_ext_engine.so")
    assert "hvd_ext_abi_version" in names
    assert any(name.startswith("hvd_ext::Engine::") for name in names)
    assert [name for name in names if not name.startswith(EXPORTS)] == []


LOADS = ("hvd_ext::LoadAbsent(", "hvd_ext::GiveLoaded(")


def test_the_library_of_the_data_cache_exports_the_c_abi_and_what_its_ops_call_and_needs_no_mpi_or_tensorflow():
    names = exported("libhvd_ext_cache.so")
    assert "hvd_ext_cache_abi_version" in names
    assert [
        name
        for name in names
        if not name.startswith(("hvd_ext_", "hvd_ext::FindStore(", "hvd_ext::SamplesOf(", *LOADS))
    ] == []
    needed = must_succeed(["readelf", "--dynamic", str(LIBRARIES / "libhvd_ext_cache.so")], RUN_LIMIT_S)
    assert "libc.so" in needed
    assert [word for word in ("mpi", "tensorflow", "hvd_ext_engine") if word in needed] == []


def test_the_ops_of_the_data_cache_export_nothing_and_need_tensorflows_c_api_alone():
    assert exported("libhvd_ext_data.so") == []
    library = str(LIBRARIES / "libhvd_ext_data.so")
    needed = re.findall(r"NEEDED.*\[(.*)\]", must_succeed(["readelf", "--dynamic", library], RUN_LIMIT_S))
    ours = [name for name in needed if not name.startswith(("libc.", "libm.", "libstdc++.", "libgcc_s.", "ld-linux"))]
    assert ours == ["libhvd_ext_cache.so", "libtensorflow_framework.so.2"]
    undefined = must_succeed(["nm", "--dynamic", "--undefined-only", "--demangle", library], RUN_LIMIT_S)
    assert " TF_NewKernelBuilder" in undefined
    assert [line for line in undefined.splitlines() if re.search(r"tensorflow::|tsl::|absl::", line)] == []


def mpirun(ranks: int, program: str, argument: str) -> list[str]:
    """Gives the command of a program of the tests on some ranks."""
    return ["mpirun", "-np", str(ranks), "--oversubscribe", str(built() / "tests" / program), argument]


TCP = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {}), (3, {}), (2, TCP)], ids=["1", "2", "3", "tcp"])
def test_the_mpi_transport_keeps_its_contract(ranks, changes):
    must_succeed(mpirun(ranks, "hvd_ext_mpi_tests", "--quiet"), RUN_LIMIT_S, **changes)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["started", "attached", "single"])
def test_the_mpi_transport_starts_or_attaches_to_mpi(mode):
    must_succeed(mpirun(2, "hvd_ext_mpi_life", mode), RUN_LIMIT_S)


@pytest.mark.mpi
def test_mpi_starts_without_a_launcher():
    must_succeed([str(built() / "tests" / "hvd_ext_mpi_life"), "started"], RUN_LIMIT_S)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["failed", "abort", "making"])
def test_a_rank_that_goes_down_alone_ends_the_job(mode):
    # The others would sleep for longer than the limit.
    code, output = run(mpirun(2, "hvd_ext_mpi_life", mode), RUN_LIMIT_S)
    assert code != 0
    assert "wrong:" not in output
