"""Made once per test session: tiny random checkpoints, ordinary Hugging Face directories, and a
PostgreSQL server."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentrl.store import open_store
from agentrl.store.sqlite import migrations
from agentrl.store.sqlite.connection import Location
from tests import spine
from tests.factories import Register
from tests.store import postgres_server
from tests.system.conftest import run_folder as run_folder

torch.set_num_threads(1)
hypothesis.settings.register_profile("no clock", deadline=None)  # a busy machine fails no example
hypothesis.settings.load_profile("no clock")

LONG = ("tests/test_parts.py", "tests/system/", "tests/examples/")
VOCABULARY = 512
CORPUS = [
    "You are a helpful assistant. Answer with one word after calling a tool.",
    'What is the team of Ada Berg? {"name": "query", "arguments": {"sql": "SELECT team"}}',
    "<tool_response> sales legal finance support </tool_response> Oslo Lima Cairo Delhi Porto",
    '# Tools You may call one or more functions: {"type": "function", "function": {}}',
]
# The Hermes / Qwen2.5 convention: tools in the system turn, calls and results as tagged JSON.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{%- generation %}{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (message.role == 'system' and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=512,
    )


def _save(model: PreTrainedModel, directory: Path) -> Path:
    model.eval().save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # large enough that contexts matter and tokens differ
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without parts their tests cannot be imported; where only these run, others need not be."""
    if spine.WITHOUT_PARTS:
        return not spine.tests(collection_path) or None
    only_parts = config.option.markexpr.startswith("part ") and collection_path.is_file()
    return (only_parts and spine.needs_none(collection_path)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the longest come first: none waits for another at the end."""
    for item in items:
        if not spine.tests(item.path) or "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker("part")
        if item.get_closest_marker("part"):
            assert not spine.needs_none(item.path), f"{item.nodeid} would not run: see spine.py"
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not (item.nodeid.startswith(LONG) or runs_processes(item)))


def runs_processes(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "module", None), "warm")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: the garbage collector need not look through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test asks a server elsewhere. Every HTTP client reads the certificates of all authorities,
    which takes 20 ms; here, and in all processes that are started, there is one."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def new_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A new SQLite store is a copy of an empty one: its migrations take longer than many a test.
    Those of `tests/store/test_migrations.py` apply them."""
    empty = tmp_path_factory.mktemp("store") / "empty.db"
    asyncio.run(open_store(f"sqlite:///{empty}").close())
    prepare = migrations.prepare

    def copied(location: Location, *, create: bool = True) -> None:
        if create and not location.path.exists() and location.path.parent.is_dir():
            copy = location.path.with_name(f"{location.path.name}.{threading.get_ident()}")
            with suppress(OSError):  # another thread was first, or the folder is the test's subject
                shutil.copyfile(empty, copy)
                location.path.hardlink_to(copy)
            copy.unlink(missing_ok=True)
        prepare(location, create=create)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "prepare", copied)
        yield


@pytest.fixture
def register(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Installs a package, until the test ends, with one entry point: group, name and object."""

    def install(group: str, name: str, target: str) -> None:
        folder = tmp_path_factory.mktemp("theirs")
        about = folder / f"{folder.name}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
        monkeypatch.syspath_prepend(folder)

    return install


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Qwen2 with 512 tokens, 2 layers, grouped-query heads and tied embeddings."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
    return _save(model, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Llama of the same shape with untied embeddings."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    return _save(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model_dir` with heads of 32, the smallest that vLLM's attention takes on a CPU."""
    torch.manual_seed(2)
    shape = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    return _save(model, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="session")
def server() -> Iterator[postgres_server.Server]:
    """A PostgreSQL server for all tests."""
    if postgres_server.binaries() is None:
        pytest.skip("PostgreSQL is not installed: neither on PATH nor in /usr/lib/postgresql")
    with postgres_server.running() as server:
        yield server


@pytest.fixture(scope="session")
def postgres(server: postgres_server.Server) -> Callable[[], str]:
    """Makes databases with an empty store."""
    template = server.make()
    asyncio.run(open_store(template).close())
    name = template.removeprefix("postgresql:///").partition("?")[0]
    return lambda: server.make(name)
