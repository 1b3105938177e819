# SPDX-License-Identifier: Apache-2.0
"""Machine profiles: measurement, files, shipped families, interpolation and knees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsetir.cli import main
from sparsetir.codegen import calibration, target
from sparsetir.errors import ArgumentError
from sparsetir.utils.machine import DATA, MachineProfile, find_knees, interpolate, shipped_profile

FAMILIES = json.loads((DATA / "families.json").read_text())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Measure little, and keep it in a folder of the test."""
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(calibration.SWITCH, raising=False)
    monkeypatch.setattr(calibration, "working_sets", lambda: (16 << 10, 256 << 10, 4 << 20))
    monkeypatch.setattr(calibration, "STORED", 1 << 16)
    calibration.machine_profile.cache_clear()
    yield tmp_path / "cache"
    calibration.machine_profile.cache_clear()


@pytest.mark.slow
def test_measured_once_and_read_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = calibration.machine_profile()
    assert profile.origin == "measured"
    assert [len(profile.gather), len(profile.gather[0]), len(profile.gather[0][0])] == [5, 3, 3]
    rates = [profile.store, profile.streaming_store, *profile.fma.values(), profile.scalar_load, profile.vector_gather]
    assert all(0 < rate < np.inf for rate in (*rates, profile.fma_latency))
    monkeypatch.setattr(calibration, "calibrate", lambda **_: pytest.fail("measured twice"))
    calibration.machine_profile.cache_clear()
    again = calibration.machine_profile()
    assert again.as_dict() == profile.as_dict()
    assert len(list(small.glob("profile-*.json"))) == 1


@pytest.mark.slow
def test_dot_products_that_the_processor_has_are_measured(small: Path) -> None:
    cpu = target.host_cpu()
    features = frozenset() if cpu is None else cpu.features
    expected = {name for name, dot in calibration.DOTS.items() if dot.feature in features}
    assert set(calibration.calibrate(seconds=0.1).dots) == expected


def test_the_best_of_several_rounds_counts() -> None:
    """Rates are lower and times longer beside other work; threads wake sooner or later as the system places them."""
    rounds = [
        {"store": store, "fma": {1: store, 4: 1.0}, "scalar_load": load, "wake": wake}
        for store, load, wake in ((3.0, 2.0, 1.0), (5.0, 4.0, 9.0), (4.0, 3.0, 4.0))
    ]
    best = calibration._best_rates(rounds)
    assert best == {"store": 5.0, "fma": {1: 5.0, 4: 1.0}, "scalar_load": 2.0, "wake": 4.0}


def test_another_processor_has_another_file(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = calibration.profile_key()
    cpu = target.Cpu("x86_64", "GenuineIntel", frozenset({"avx2"}), "test")
    monkeypatch.setattr(calibration, "host_cpu", lambda: cpu)
    assert calibration.profile_key() != key


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', "nonsense", "[" * 100_000])
def test_damaged_file_is_measured_again(small: Path, text: str) -> None:
    small.mkdir(mode=0o700, exist_ok=True)
    path = small / f"profile-{calibration.profile_key()}.json"
    path.write_text(text)
    assert calibration.read_profile() is None


def test_nothing_is_measured_where_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.SWITCH, "0")
    monkeypatch.setattr(calibration, "calibrate", lambda **_: pytest.fail("measured"))
    calibration.machine_profile.cache_clear()
    assert calibration.machine_profile() == calibration.family_profile()
    calibration.machine_profile.cache_clear()


@pytest.mark.parametrize("mcpu", [*FAMILIES, "pentium4"])
def test_shipped_profiles(mcpu: str) -> None:
    profile = shipped_profile(mcpu)
    sets = profile.working_sets
    assert list(sets) == sorted(set(sets))
    assert len(profile.levels) >= 3
    assert profile.levels[0].rate > 2 * profile.levels[-1].rate
    assert MachineProfile.from_dict(json.loads(json.dumps(profile.as_dict()))).as_dict() == profile.as_dict()
    assert profile.origin == "measured" or "measured" in profile.origin or "scaled from" in profile.origin


def test_every_shipped_family_is_a_name_of_llvm() -> None:
    for name in FAMILIES:
        architecture = "aarch64" if name.startswith(("neoverse", "apple")) else "x86_64"
        assert name == "generic" or target._required(architecture, name) is not None


@pytest.mark.parametrize(
    ("mcpu", "mattr", "family"),
    [
        ("emeraldrapids", [], "emeraldrapids"),
        ("diamondrapids", [], "graniterapids-d"),
        ("tigerlake", [], "icelake-server"),
        ("raptorlake", [], "skylake"),
        ("broadwell", [], "haswell"),
        ("znver5", [], "znver5"),
        ("neoverse-v3", [], "neoverse-v2"),
        ("x86-64-v3", [], "generic"),
        ("no processor", [], None),
    ],
)
def test_other_processors_have_the_profile_of_the_one_most_like_them(
    mcpu: str, mattr: list[str], family: str | None
) -> None:
    architecture = "aarch64" if mcpu.startswith("neoverse") else "x86_64"
    assert target.closest_name(mcpu, FAMILIES, mattr, architecture=architecture) == family


def test_added_features_count_for_the_profile_of_a_masked_processor() -> None:
    added = [f"+{feature}" for feature in target._required("x86_64", "sapphirerapids") or ()]
    assert target.closest_name("x86-64-v4", FAMILIES, [*added, "+prefer-no-gather"]) == "emeraldrapids"


@pytest.mark.parametrize("name", [name for names in target.NAMES.values() for name in names])
def test_processors_with_wide_vectors_have_a_profile_of_relatives(name: str) -> None:
    """Only those without AVX2, or of the first 64-bit Arm cores, have the generic one."""
    for architecture in target.TRIPLES:
        features = target._required(architecture, name) or frozenset()
        if {"avx2", "fma"} <= features or {"dotprod", "fullfp16"} <= features:
            assert target.closest_name(name, FAMILIES, architecture=architecture) not in (None, "generic")


@pytest.mark.parametrize("name", ["neoverse-n1", "neoverse-v1", "neoverse-v2"])
def test_added_features_count_for_the_profile_of_an_arm_core_of_another_maker(name: str) -> None:
    added = [f"+{feature}" for feature in target._required("aarch64", name) or ()]
    assert target.closest_name("generic", FAMILIES, added, architecture="aarch64") == name


def test_smaller_caches_of_a_relative_end_earlier() -> None:
    zen4, zen2 = shipped_profile("znver4"), shipped_profile("znver2")
    assert [level.size for level in zen2.levels if level.size] < [level.size for level in zen4.levels if level.size]
    assert zen2.gather_seconds(512, 1 << 20) > zen4.gather_seconds(512, 1 << 20)


def test_interpolation() -> None:
    points, values = (1, 4, 16), (1.0, 2.0, 8.0)
    assert [interpolate(points, values, at) for at in (0.5, 1, 16, 99)] == [1.0, 1.0, 8.0, 8.0]
    assert interpolate(points, values, 2) == pytest.approx(2**0.5)
    profile = shipped_profile("sapphirerapids")
    between = profile.gather_seconds(512, 3 << 20)
    assert profile.gather_seconds(512, 2 << 20) < between < profile.gather_seconds(512, 4 << 20)
    assert profile.gather_seconds(4096, 1 << 20) == pytest.approx(2 * profile.gather_seconds(2048, 1 << 20))


def test_arrays_that_are_read_in_order() -> None:
    zen = shipped_profile("znver4")
    assert zen.read_seconds(4096, 1 << 20) == pytest.approx(2 * zen.gather_seconds(2048, 1 << 20))  # not measured
    times = tuple(1e-11 * (1 + n) for n in range(len(zen.working_sets)))
    other = MachineProfile.from_dict({**zen.as_dict(), "read": times})
    assert other.read_seconds(100, zen.working_sets[3]) == pytest.approx(4e-9)
    assert other.read_seconds(100, zen.working_sets[4]) > other.read_seconds(100, zen.working_sets[3])
    assert other.scaled("relative", "scaled", {1 << 20: 1 << 19}, 2.0).read[0] == pytest.approx(5e-12)
    assert "in order" in other.report()
    assert "in order" not in zen.report()


def test_knees_of_plateaus() -> None:
    assert find_knees([1, 1, 1.1, 2, 4, 4.1, 4.2, 9, 9]) == [2, 6, 8]
    assert find_knees([1, 1.1, 1.05]) == [2]


def test_effective_levels_of_a_virtual_machine_with_a_large_slow_cache() -> None:
    """Rows beyond 1 MiB of this machine are far, although its last cache is said to hold 480 MiB."""
    sizes = [level.size for level in shipped_profile("sapphirerapids").levels]
    assert 1 << 20 in sizes
    slow = shipped_profile("sapphirerapids").gather_seconds(512, 16 << 20)
    assert slow > 5 * shipped_profile("sapphirerapids").gather_seconds(512, 1 << 20)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_bad_seconds(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="seconds: expected a positive, finite number"):
        calibration.calibrate(seconds=seconds)


BAD_NUMBERS = (None, "x", np.nan, np.inf, -1.0, [], {})


@pytest.mark.parametrize(
    "change",
    [
        *({"format": 0}, {"gather": [[[1.0]]]}, {"unknown": 1}, {"fma": {}}, {"fma": {"x": 1.0}}),
        *({"working_sets": [np.inf]}, {"prefetch": [None]}, {"row_bytes": [0] * 5}, {"row_bytes": [-1, 1, 2, 3, 4]}),
        {"prefetch": [], "gather": [[[]] * 14] * 5},
        *({"row_bytes": [512, 256, 128, 64, 32]}, {"read": [1e-11]}, {"read": [-1e-11] * 14}, {"read": 1.0}),
        *({name: bad} for name in ("wake", "scalar_load", "store", "noise", "fma", "dots", "row_bytes", "private")
          for bad in BAD_NUMBERS if (name, bad) != ("dots", {})),
    ],
)  # fmt: skip
def test_bad_values(change: dict[str, object]) -> None:
    values = shipped_profile("znver4").as_dict() | change
    with pytest.raises(ArgumentError, match="profile: expected a machine profile of format 1"):
        MachineProfile.from_dict(values)


@pytest.mark.slow
def test_command(small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--seconds", "0.1", "--json", str(tmp_path / "profile.json")]) == 0
    out = capsys.readouterr().out
    for text in ("effective levels", "GFLOP/s by accumulators", "waking a thread", "noise: "):
        assert text in out
    written = MachineProfile.from_dict(json.loads((tmp_path / "profile.json").read_text()))
    kept = calibration.read_profile()
    assert kept is not None
    assert written.as_dict() == kept.as_dict()


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sparsetir.bench.roofline import draw_profile

    path = draw_profile(replace(shipped_profile("znver4"), name="test"), tmp_path / "profile.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
