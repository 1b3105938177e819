# SPDX-License-Identifier: Apache-2.0
"""Training side by side: every way of a network learns the same, and the tables and pictures of the examples."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.workloads.reference import WrongResultError

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
from sparsetir.bench.training import measure, networks  # noqa: E402
from sparsetir.bench.training.networks import KINDS, OURS, TORCH, Spec  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
TINY = "communities:300"
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(scope="module")
def problem() -> Any:
    return networks.load(TINY, features=5, classes=3)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports an example, as if it was run in its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_learn_the_same(kind: str, problem: Any) -> None:
    is_full = bool(os.environ.get("SPARSETIR_FULL"))
    chosen = [way for way in networks.ways(kind) if way != networks.INDUCTOR or is_full]  # it compiles for long
    runs = measure.trained(problem, Spec.parse(f"{kind}:4"), chosen, 2)
    assert list(runs) == chosen
    assert [len(run.losses) for run in runs.values()] == [4] * len(chosen)
    assert len(set(runs[OURS].losses)) == 4
    assert measure.difference(runs) < 1e-5
    assert len({run.accuracy for run in runs.values()}) == 1


def test_the_compiler_of_torch_needs_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "which", lambda _name: "/usr/bin/c++")
    assert networks.INDUCTOR in networks.ways("gcn")
    monkeypatch.setattr(networks, "which", lambda _name: None)
    assert networks.INDUCTOR not in networks.ways("gcn")


@pytest.mark.slow
@pytest.mark.parametrize("kind", networks.FIRST)
def test_sparse_features_are_a_factor(kind: str, problem: Any) -> None:
    words = replace(problem, x=problem.x.where(torch.rand(problem.x.shape) < 0.05, 0))
    chosen = networks.ways(kind)[:3]
    contenders = [networks.make(way, Spec.parse(f"{kind}:4"), words) for way in chosen]
    assert [isinstance(made.x, torch.Tensor) for made in contenders] == [way.startswith("PyG") for way in chosen]
    runs = measure.trained(words, Spec.parse(f"{kind}:4"), chosen, 2)
    assert measure.difference(runs) < 1e-5


def test_a_way_that_fails_is_left_out(problem: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(networks, "_matrix", lambda *_: 1 / 0)
    runs = measure.trained(problem, Spec.parse("gcn:4"), [OURS, TORCH], 1)
    assert list(runs) == [OURS]
    assert "left out: torch CSR, gcn:4 on communities:300: ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(networks, "_graph", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure.trained(problem, Spec.parse("gcn:4"), [OURS], 1)


def test_networks_by_name() -> None:
    assert [str(Spec.parse(text)) for text in ("gcn", "sage-max:3", "gat", "gat:4x32")] == [
        "gcn:16",
        "sage-max:3",
        "gat:8x8",
        "gat:4x32",
    ]
    for text in ("gin", "gcn:x", "gcn:2x8", "gat:ax8"):
        with pytest.raises(ArgumentError, match=f"a network such as gcn:16 or gat:8x8, of gcn.*, got '{text}'"):
            Spec.parse(text)


def test_generated_graphs(problem: Any) -> None:
    A = problem.adjacency
    assert (A != A.T).nnz == 0
    assert not A.diagonal().any()
    assert sorted(torch.cat([problem.train, problem.test]).tolist()) == list(range(A.shape[0]))
    assert (problem.classes, problem.x.shape[1], problem.relations.size) == (3, 5, A.nnz)
    again = networks.load(TINY, features=5, classes=3)
    assert torch.equal(again.x, problem.x)
    assert torch.equal(again.y, problem.y)
    for name in ("karate", "rmat:many", "rmat:0"):
        with pytest.raises(ArgumentError, match=rf"expected a .*, got '{name}'"):
            networks.load(name)


def test_real_graphs_need_their_files(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSETIR_DATA", str(tmp_path))
    assert networks.available() == []
    assert [networks.usual(relations=known) for known in (False, True)] == ["communities", "communities"]
    with pytest.raises(ArgumentError, match=r"cora is read from graphs/cora.npz in the folder that SPARSETIR_DATA"):
        networks.load("cora")
    (tmp_path / "graphs").mkdir()
    sp.save_npz(tmp_path / "graphs" / "pubmed.npz", sp.csr_matrix(np.eye(4)))
    assert networks.available() == ["pubmed"]
    assert str(networks.load("pubmed")) == "pubmed: 4 nodes, 4 edges"


def test_triples_are_relations_of_edges(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSETIR_DATA", str(tmp_path))
    (tmp_path / "relational").mkdir()
    triples = np.array([[1, 0, 1], [0, 2, 3], [2, 1, 2]])  # relations, subjects, objects
    np.savez(tmp_path / "relational" / "fb15k237.npz", coords=triples, shape=np.array([2, 4, 4]))
    assert [networks.usual(relations=known) for known in (False, True)] == ["communities", "fb15k237"]
    problem = networks.load("fb15k237", classes=2)
    assert problem.edge_index.tolist() == [[2, 0, 3], [1, 2, 2]]
    assert problem.relations.tolist() == [0, 1, 1]
    into, sums, counts = networks.by_relation(problem)
    assert (into.toarray().tolist(), sums.toarray().tolist()) == (
        [[0, 0, 1, 0], [1, 0, 0, 1]],
        [[0, 0], [1, 0], [0, 1], [0, 0]],
    )
    assert counts == [1, 1]


def test_losses_that_differ_are_seen() -> None:
    runs = {name: measure.TrainingRun([5.0, last], None, 0.0) for name, last in (("one", 2.0), ("two", 2.2))}  # type: ignore[arg-type]
    assert measure.difference(runs) == pytest.approx(0.2 / 2.2)
    with pytest.raises(ArgumentError, match="one epoch or more, got 0"):
        measure.side_by_side({}, 0)


@pytest.mark.slow
def test_the_table(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "apart", lambda *_: 1_500_000)
    threads = str(torch.get_num_threads())
    options = ["--graph", TINY, "--network", "gcn:4", "--ways", TORCH, "--epochs", "1", "--peak", "--threads", threads]
    measure.main(options)
    head, _, ours, torchs = capsys.readouterr().out.splitlines()
    assert head.startswith("| graph | network | way | ms an epoch | spread | ratio | peak MB | loss | accuracy |")
    assert ours.startswith(f"| {TINY} | gcn:4 | ours |")
    assert "| 1.5 |" in torchs
    with pytest.raises(SystemExit):
        measure.main(["--network", "gin"])
    assert "expected a network such as" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_of_operators(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "INPUTS", 20)
    monkeypatch.setattr(measure, "OUTPUTS", 10)
    threads = str(torch.get_num_threads())
    measure.main(["--operators", "--graph", TINY, "--features", "3", "--epochs", "1", "--threads", threads])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "| graph | operator | ours ms | torch ms | ratio | spread |"
    assert [line.split(" | ")[1].partition(" ")[0] for line in lines] == ["spmm,", "spmm", "spmm,", "linear"]
    wrong = {measure.OURS: lambda: [torch.ones(2)], measure.TORCH: lambda: [torch.zeros(2)]}
    monkeypatch.setattr(measure, "cases", lambda *_: {"spmm": wrong})
    with pytest.raises(WrongResultError, match=r"spmm differs from torch by 1.0e\+00"):
        measure.operator_rows(networks.load(TINY), 3, 1)


@pytest.mark.slow
def test_memory_of_a_way() -> None:
    if not measure.CLEAR.exists():
        pytest.skip("the system does not tell")
    assert measure.memory(OURS, "communities:60000", Spec.parse("gcn:32")) > 0


@pytest.mark.slow
def test_the_example(example: Any, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--model", "sage-mean:4", "--graph", TINY, "--epochs", "1", "--no-memory", "--out", str(tmp_path)]
    runs = example("graph_network").main([*options, "--threads", str(torch.get_num_threads())])
    printed = capsys.readouterr().out
    assert all(f"\n{way} " in printed for way in runs)
    assert "largest difference of losses" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["sage-mean_4_on_communities_300.png"]


@pytest.mark.slow
@pytest.mark.parametrize("moved", ["0", "0.4"])
def test_sparse_and_masked_weights_learn_the_same(moved: str, example: Any, capsys: Any) -> None:
    sizes = ["--features", "8", "--hidden", "16", "--rows", "24", "--batch", "10", "--density", "0.25"]
    options = [*sizes, "--set", moved, "--epochs", "3", "--no-memory", "--threads", str(torch.get_num_threads())]
    module = example("sparse_network")
    runs = module.main(options)
    printed = capsys.readouterr().out
    assert "largest difference of the losses" in printed
    assert "of sparse and masked weights: " in printed
    assert measure.difference({way: runs[way] for way in (module.OURS, module.MASKED)}) < measure.CLOSE  # in all epochs
    assert all(len(run.losses) == 4 for run in runs.values())
    assert runs[module.OURS].accuracy == runs[module.MASKED].accuracy
    assert runs[module.OURS].losses != runs[module.DENSE].losses
    if moved != "0":
        assert runs[module.OURS].losses != runs[module.FIXED].losses


@pytest.mark.slow
def test_masks_follow_moved_weights(example: Any) -> None:
    module = example("sparse_network")
    options = [
        "--features",
        "8",
        "--hidden",
        "16",
        "--rows",
        "24",
        "--batch",
        "10",
        "--density",
        "0.25",
        "--set",
        "0.4",
    ]
    made = {way: make() for way, make in module.trainings(module.arguments(options)).items()}
    before = module.places(made[module.OURS].model[0])
    for training in made.values():
        training.epoch()
    sparse, masked = made[module.OURS].model[0], made[module.MASKED].model[0]
    after = module.places(sparse)
    assert 0 < int((before * (1 - after)).sum()) == int((after * (1 - before)).sum())
    assert torch.equal(masked.mask, after)
    assert torch.allclose(masked.weight * masked.mask, torch.from_numpy(sparse.weight.toarray()), atol=1e-6)
    assert not (masked.weight * (1 - after)).any()
