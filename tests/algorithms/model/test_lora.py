"""Adapters against peft itself, and against training and serving each of them alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import (
    HANDLED_KEYS,
    PLAIN_VALUES,
    WEIGHTS,
    LoraAdapters,
    fingerprint,
)
from agentrl.algorithms.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.models.export import export_merged
from tests.algorithms.learners.test_learner import make_batch, psi_for

TOKENS = torch.arange(3, 40)[None]
BOTH = {"planner": 4, "solver": 2}  # rank by name


@pytest.fixture(params=["tiny_model_dir", "tiny_llama_dir"])
def base(request: pytest.FixtureRequest) -> Path:
    """Tied Qwen2 and untied Llama."""
    directory: Path = request.getfixturevalue(request.param)
    return directory


def make(base: Path, ranks: dict[str, int] = BOTH, *, trained: bool = True) -> LoraAdapters:
    """Adapters of these ranks, the second on the attention alone; `trained`: they have effect."""
    adapters = LoraAdapters(load_model(base, device="cpu")[0])
    for name, rank in ranks.items():
        targets = ["q_proj", "v_proj"] if name == "solver" else []
        adapters.add(name, rank=rank, alpha=8.0, targets=targets, seed=5)
        if trained:
            generator = torch.Generator().manual_seed(rank)
            for parameter in adapters.parameters(name).values():
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return adapters


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    answer: Tensor = model(TOKENS).logits
    return answer


def adapted(adapters: LoraAdapters, name: str | None) -> Tensor:
    with adapters.using(name):
        return logits(adapters.model)


def copies(adapters: LoraAdapters, name: str) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in adapters.parameters(name).items()}


def frozen(adapters: LoraAdapters) -> dict[str, Tensor]:
    state = adapters.model.state_dict()
    return {key: tensor.clone() for key, tensor in state.items() if ".lora_" not in key}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_answers_are_those_of_peft_and_of_the_merged_model(base: Path, tmp_path: Path) -> None:
    plain = logits(load_model(base, device="cpu")[0])
    adapters = make(base)
    answers = {name: adapted(adapters, name) for name in BOTH}
    before = frozen(adapters)
    for name, answer in answers.items():
        adapters.save(name, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(base)
        theirs = logits(PeftModel.from_pretrained(model, tmp_path / name))
        torch.testing.assert_close(answer, theirs, rtol=0, atol=1e-5)

        adapters.merge(name, tmp_path / f"{name}-merged")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged")
        torch.testing.assert_close(answer, logits(whole), rtol=0, atol=1e-5)
        assert (answer - plain).abs().max() > 0.1
        assert torch.equal(adapted(adapters, name), answer)
    assert torch.equal(logits(adapters.model), plain)
    assert torch.equal(adapted(adapters, None), plain)
    assert same(frozen(adapters), before)


def test_a_new_adapter_depends_on_seed_and_name_alone(tiny_llama_dir: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make(tiny_llama_dir, trained=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = make(tiny_llama_dir, dict(reversed(BOTH.items())), trained=False)
    plain = logits(load_model(tiny_llama_dir, device="cpu")[0])
    for name in BOTH:
        assert same(copies(first, name), copies(second, name))
        assert torch.equal(adapted(first, name), plain)
    key = "model.layers.0.self_attn.q_proj.lora_A"
    assert not torch.equal(first.parameters("planner")[key][:2], first.parameters("solver")[key])


def test_each_token_may_have_an_adapter_of_its_own(tiny_llama_dir: Path) -> None:
    adapters = make(tiny_llama_dir)
    layer = adapters.model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = {}
        for name in (*BOTH, None):
            with adapters.using(name):
                alone[name] = layer(x)
        tokens = {"planner": torch.tensor([0, 3, 4]), "solver": torch.tensor([5])}
        with adapters.routed(list(tokens.items())):
            mixed = layer(x)
    names = ["planner", None, None, "planner", "planner", "solver"]
    for token, name in enumerate(names):
        torch.testing.assert_close(mixed[:, token], alone[name][:, token], rtol=0, atol=1e-6)


def test_uses_nest_and_end_with_an_error(tiny_llama_dir: Path) -> None:
    adapters = make(tiny_llama_dir)
    plain, solver = adapted(adapters, None), adapted(adapters, "solver")
    with adapters.using("solver"):
        assert torch.equal(adapted(adapters, None), plain)
        assert torch.equal(logits(adapters.model), solver)
        with pytest.raises(IndexError), adapters.using(None):
            adapters.model(torch.tensor([[10**6]]))
        assert torch.equal(logits(adapters.model), solver)
    assert torch.equal(logits(adapters.model), plain)


MakeLearner = Callable[..., TorchLearner]


def learner_of(adapters: LoraAdapters, name: str, base: Path) -> TorchLearner:
    tokenizer = load_model(base, device="cpu")[1]
    return TorchLearner(adapters.model, tokenizer, threads=1, adapters=adapters, policy=name)


def step(learner: TorchLearner, seed: int, lr: float = 0.01) -> float:
    batch = make_batch(seed, rollouts=3)
    return learner.step(batch, psi_for(batch), lr=lr).loss


def test_learners_that_share_a_base_learn_as_if_each_were_alone(tiny_llama_dir: Path) -> None:
    shared = make(tiny_llama_dir, trained=False)
    before = frozen(shared)
    learners = {name: learner_of(shared, name, tiny_llama_dir) for name in BOTH}
    losses: dict[str, list[float]] = {name: [] for name in BOTH}
    for seed in range(2):
        for number, name in enumerate(BOTH):
            other = next(each for each in BOTH if each != name)
            untouched = copies(shared, other)
            losses[name].append(step(learners[name], seed, lr=0.01 * (number + 1)))
            assert same(copies(shared, other), untouched)
    assert same(frozen(shared), before)
    for number, (name, rank) in enumerate(BOTH.items()):
        alone = make(tiny_llama_dir, {name: rank}, trained=False)
        learner = learner_of(alone, name, tiny_llama_dir)
        assert [step(learner, seed, 0.01 * (number + 1)) for seed in range(2)] == losses[name]
        assert same(copies(alone, name), copies(shared, name))
        assert alone.parameters(name)["model.layers.1.self_attn.v_proj.lora_B"].abs().max() > 0
        batch = make_batch(7)
        assert torch.equal(learner.logprobs(batch), learners[name].logprobs(batch))


def test_an_adapter_learns_what_it_is_rewarded_for(tiny_llama_dir: Path) -> None:
    learner = learner_of(make(tiny_llama_dir, trained=False), "solver", tiny_llama_dir)
    batch = make_batch(0, rollouts=2)
    before = learner.logprobs(batch)
    for _ in range(8):
        learner.step(batch, lambda logprobs, _: torch.full_like(logprobs, 0.1), lr=0.02)
    assert learner.logprobs(batch).mean() > before.mean() + 1.0


def test_the_gradient_is_that_of_peft(base: Path, tmp_path: Path) -> None:
    adapters = make(base)
    adapters.save("planner", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    theirs = PeftModel.from_pretrained(loaded, tmp_path, is_trainable=True).eval()
    theirs(TOKENS, labels=TOKENS).loss.backward()
    with adapters.using("planner"):
        adapters.model(TOKENS, labels=TOKENS).loss.backward()
    wanted = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    found = {name: p.grad for name, p in adapters.parameters("planner").items()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in adapters.parameters("solver").values())


def test_a_resumed_adapter_learns_bitwise_alike(tiny_llama_dir: Path, tmp_path: Path) -> None:
    whole = learner_of(make(tiny_llama_dir, trained=False), "planner", tiny_llama_dir)
    losses = [step(whole, seed) for seed in range(4)]
    interrupted = learner_of(make(tiny_llama_dir, trained=False), "planner", tiny_llama_dir)
    assert [step(interrupted, seed) for seed in range(2)] == losses[:2]
    save_checkpoint(tmp_path / "c", interrupted, {})
    assert not (tmp_path / "c" / "model.safetensors").exists()  # the base is not copied

    resumed = learner_of(make(tiny_llama_dir), "planner", tiny_llama_dir)
    load_checkpoint(tmp_path / "c", resumed)
    assert [step(resumed, seed) for seed in range(2, 4)] == losses[2:]
    assert resumed.adapters is not None
    assert whole.adapters is not None
    assert same(copies(resumed.adapters, "planner"), copies(whole.adapters, "planner"))
    opened = LoraAdapters(load_model(tiny_llama_dir, device="cpu")[0])
    opened.open("other-name", tmp_path / "c")
    assert same(copies(opened, "other-name"), load_adapter(tmp_path / "c"))


def load_adapter(directory: Path) -> dict[str, Tensor]:
    tensors = load_file(directory / WEIGHTS)
    return {
        k.removeprefix("base_model.model.").removesuffix(".weight"): tensors[k] for k in tensors
    }


def test_the_fingerprint_is_of_weights_not_of_their_precision(base: Path) -> None:
    wide, narrow = (load_model(base, dtype, "cpu")[0] for dtype in ("float32", "bfloat16"))
    assert fingerprint(wide) == fingerprint(narrow)


def change_weight(base: Path, directory: Path) -> Path:
    model, tokenizer = load_model(base, device="cpu")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(1.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


REFUSED = {
    "another base": (lambda adapters, d: None, "it was trained on another base"),
    "rank": ({"rank": 3}, "its rank is 4, the policy's 3; set policy.lora.rank = 4"),
    "alpha": ({"alpha": 16.0}, "its alpha is 8, the policy's 16; set policy.lora.alpha = 8"),
    "targets": ({"targets": ["q_proj"]}, "set policy.lora.targets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused(
    case: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "c", learner_of(make(tiny_model_dir), "planner", tiny_model_dir), {})
    changes, message = REFUSED[case]
    where = tiny_model_dir
    settings = {"rank": 4, "alpha": 8.0, "targets": []}
    if isinstance(changes, dict):
        settings |= changes
    else:
        where = change_weight(tiny_model_dir, tmp_path / "other")
    adapters = LoraAdapters(load_model(where, device="cpu")[0])
    adapters.add("planner", **settings)  # type: ignore[arg-type]
    learner, before = learner_of(adapters, "planner", where), copies(adapters, "planner")
    with pytest.raises(PolicyError, match=message):
        load_checkpoint(tmp_path / "c", learner)
    assert same(copies(adapters, "planner"), before)


def test_a_damaged_adapter_directory_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapters = make(tiny_model_dir)
    adapters.save("planner", tmp_path / "whole")
    for name, damage, message in (
        (
            "config",
            lambda d: (d / "adapter_config.json").unlink(),
            "adapter_config.json is missing",
        ),
        ("weights", lambda d: (d / WEIGHTS).write_bytes(b"x" * 50), "missing or incomplete"),
        ("gone", lambda d: (d / WEIGHTS).unlink(), "missing or incomplete"),
        ("dora", lambda d: set_config(d, use_dora=True), "only plain LoRA"),
    ):
        damaged = shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(damaged)
        with pytest.raises(PolicyError, match=message):
            adapters.read("planner", damaged)


def set_config(directory: Path, **values: object) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_adapter_of_peft_is_known_by_its_base(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapters = make(tiny_model_dir)
    adapters.save("planner", tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    PeftModel.from_pretrained(loaded, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert same(adapters.read("planner", tmp_path / "theirs"), copies(adapters, "planner"))
    set_config(tmp_path / "theirs", base_model_name_or_path="elsewhere/model")
    with pytest.raises(PolicyError, match=r"another base .'elsewhere/model'"):
        adapters.read("planner", tmp_path / "theirs")


def test_a_run_file_asks_for_an_adapter_and_what_it_starts_from(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    first = make(tiny_model_dir, {"planner": 4})
    first.save("planner", tmp_path / "adapter")

    def made(**lora: object) -> LoraAdapters | None:
        policy = {"model": str(tiny_model_dir), "device": "cpu", "lora": lora}
        settings = {"root": str(tmp_path), "policy": policy, "seed": 3}
        (base,) = load_policies(resolve(settings, source="run.toml"))
        return base.adapters

    assert made() is None
    fresh, started = made(rank=4, alpha=8), made(rank=4, alpha=8, adapter="adapter")
    assert fresh is not None
    assert started is not None
    assert fresh.names == started.names == ["policy"]
    assert torch.equal(adapted(fresh, "policy"), adapted(fresh, None))
    assert torch.equal(adapted(started, "policy"), adapted(first, "planner"))
    with pytest.raises(PolicyError, match="its alpha is 8, the policy's 32"):
        made(rank=4, adapter="adapter")
    with pytest.raises(ConfigError, match=r"policy.lora.alpha has no effect while .*rank is 0"):
        made(alpha=8.0)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("one", ["q_prj"], "no linear layers 'q_prj' beside its head; did you mean 'q_proj'"),
        ("one", ["lm_head"], "no linear layers 'lm_head'"),
        ("planner", [], "the name is taken"),
        ("a.b", [], "a dot"),
    ],
)
def test_what_cannot_be_added_is_refused(
    tiny_llama_dir: Path, name: str, targets: list[str], message: str
) -> None:
    adapters = make(tiny_llama_dir)
    with pytest.raises(PolicyError, match=message):
        adapters.add(name, rank=2, alpha=4.0, targets=targets)
    assert adapters.names == list(BOTH)
    with pytest.raises(PolicyError, match="no adapter 'planer'; did you mean 'planner'"):
        adapters.parameters("planer")


def peft_config(**settings: object) -> LoraConfig:
    named: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return LoraConfig(**named | settings, task_type="CAUSAL_LM")  # type: ignore[arg-type]


def peft_adapter(base: Path, directory: Path, **settings: object) -> Path:
    """An adapter that peft has made and trained, with these settings."""
    model, config = AutoModelForCausalLM.from_pretrained(base), peft_config(**settings)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of what cannot be merged
        made = get_peft_model(model, config)
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        made.save_pretrained(directory)
    return directory


COMPUTED: dict[str, dict[str, object]] = {
    "regular expression": {"target_modules": r".*layers\.1.*(q|down)_proj"},
    "some layers": {"layers_to_transform": [1]},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "k_proj"]},
    "dropout": {"lora_dropout": 0.1},
    "another start": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "not of zeros": {"init_lora_weights": False},
    "by weight": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
}

# peft 0.21 with transformers 5.23 and after; the product ignores it where it imports peft.
PEFT_READS = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


@pytest.mark.filterwarnings(PEFT_READS)
@pytest.mark.parametrize("case", COMPUTED)
def test_an_adapter_of_peft_computes_what_it_computes_there(
    case: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    made = peft_adapter(tiny_llama_dir, tmp_path, **COMPUTED[case])
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    theirs = logits(PeftModel.from_pretrained(model, made).eval())
    adapters = LoraAdapters(load_model(tiny_llama_dir, device="cpu")[0])
    adapters.open("policy", made)
    torch.testing.assert_close(adapted(adapters, "policy"), theirs, rtol=0, atol=1e-5)
    assert (theirs - adapted(adapters, None)).abs().max() > 0.01
    export_merged(made, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), theirs, rtol=0, atol=1e-5)


UNSUPPORTED: dict[str, dict[str, object]] = {
    "alpha_pattern": {"alpha_pattern": {"q_proj": 32}},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights 2": {"init_lora_weights": "olora"},
    "init_lora_weights 3": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights 4": {"init_lora_weights": "mica"},
    "use_dora": {"use_dora": True},
    "use_rslora": {"use_rslora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
    "layer_replication": {"layer_replication": [(0, 1), (0, 2)]},
}


@pytest.fixture(scope="module")
def plain(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_adapter(tiny_llama_dir, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def adapters(tiny_llama_dir: Path) -> LoraAdapters:
    return make(tiny_llama_dir)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_adapter_is_refused_by_its_setting(
    case: str, plain: Path, adapters: LoraAdapters, tmp_path: Path
) -> None:
    if case == "init_lora_weights 4" and Version(peft.__version__) < Version("0.21"):
        pytest.skip("peft has no such start")
    made = Path(shutil.copytree(plain, tmp_path / "made"))
    peft_config(**UNSUPPORTED[case]).save_pretrained(made)
    sets = rf"sets {case.partition(' ')[0]} = .*merge_and_unload"
    with pytest.raises(PolicyError, match=sets):
        adapters.open("other", made)
    with pytest.raises(PolicyError, match=sets):
        export_merged(made, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert adapters.names == list(BOTH)


def test_what_a_newer_peft_has_set_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    made = peft_adapter(tiny_llama_dir, tmp_path)
    set_config(made, use_something_new=False)
    with pytest.warns(UserWarning, match="use_something_new"):
        make(tiny_llama_dir).open("other", made)
    set_config(made, use_something_new=True)
    unknown = pytest.warns(UserWarning, match="use_something_new")
    with unknown, pytest.raises(PolicyError, match="sets use_something_new"):
        make(tiny_llama_dir).open("another", made)


def test_every_setting_of_peft_is_known() -> None:
    """A new one is refused until somebody has looked at what it computes."""
    known = HANDLED_KEYS | PLAIN_VALUES.keys() | {case.partition(" ")[0] for case in UNSUPPORTED}
    refused = {
        "use_qalora", "kasa_config", "velora_config", "monteclora_config", "arrow_config",
        "use_bdlora", "ensure_weight_tying",
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields <= known | refused
    assert not HANDLED_KEYS & refused
