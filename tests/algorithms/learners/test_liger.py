"""What is said where Liger Kernel cannot be used: its kernels need a GPU."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.algorithms.learners import factory
from agentrl.algorithms.learners.factory import use_liger
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets import registry
from agentrl.core.config import resolve
from agentrl.core.errors import PolicyError


def model(device: str, kind: str = "qwen2") -> SimpleNamespace:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), config=SimpleNamespace(model_type=kind)
    )


def test_a_cpu_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"learner.liger_kernel: the policy is on cpu"):
        use_liger(model("cpu"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(PolicyError, match=r"pip install .*\[liger\]'"):
        use_liger(model("cuda"))


def test_only_the_given_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of transformers stay, also if Liger fails half-way."""

    def replace(model: object, **_: bool) -> None:
        vars(sys.modules[__name__])["model"] = None
        raise RuntimeError

    known = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"known": replace}, _apply_liger_kernel_to_instance=replace
    )
    package = SimpleNamespace(monkey_patch=known)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    with pytest.raises(PolicyError, match="does not support model type 'other'"):
        use_liger(model("cuda", "other"))
    before = model

    class Here(SimpleNamespace):
        pass

    with pytest.raises(RuntimeError):
        use_liger(Here(**vars(model("cuda", "known"))))
    assert model is before


def test_a_run_patches_the_model_that_it_trains(tiny_model_dir: Path) -> None:
    settings = resolve({"learner": {"liger_kernel": True}}, source="test")
    algo = registry.make("grpo", {})
    loaded, tokenizer = load_model(tiny_model_dir, device="cpu")
    with pytest.raises(PolicyError, match=r"learner.liger_kernel: the policy is on cpu"):
        factory.make_learner(settings, algo, loaded, tokenizer)
