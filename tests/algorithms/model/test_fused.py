"""What is said where Liger Kernel cannot be used: its kernels need a GPU."""

import sys
from types import SimpleNamespace

import pytest

from agentrl.algorithms.model.fused import use_liger
from agentrl.errors import PolicyError


def model(device: str, kind: str = "qwen2") -> SimpleNamespace:
    return SimpleNamespace(
        device=SimpleNamespace(type=device), config=SimpleNamespace(model_type=kind)
    )


def test_a_cpu_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"learner.liger_kernel: the policy is on cpu"):
        use_liger(model("cpu"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(PolicyError, match=r"pip install 'agentrl\[liger\]'"):
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
    with pytest.raises(PolicyError, match="has none for model type 'other'"):
        use_liger(model("cuda", "other"))
    before = model

    class Here(SimpleNamespace):
        pass

    with pytest.raises(RuntimeError):
        use_liger(Here(**vars(model("cuda", "known"))))
    assert model is before
