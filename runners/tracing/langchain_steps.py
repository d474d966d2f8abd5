"""Steps of LangChain and LangGraph as spans, without their inputs and outputs.

A callback handler logs name, kind, parent, times and success of agents, chains and tools; their
texts are in the calls. OpenInference's instrumentation (`instrument_frameworks`) records the
texts too, for about a third more CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any
from uuid import UUID

from agentrl.core.errors import ConfigError
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing.attempt_log import AttemptLog, step_id

GRAPH = "LangGraph"  # default name of a compiled graph
_recorder: Callable[[UUID], Any] | None = None  # returns the other tracer's span of a run


def install() -> None:
    """Register the handler, if the process has imported LangChain."""
    if "langchain_core" in sys.modules:
        _register()


def instrument_frameworks() -> None:
    """Record LangChain and LangGraph steps with inputs and outputs, as OpenInference spans: for an
    agent's module to call.

    Raises ConfigError if the instrumentation package is missing."""
    try:
        from openinference.instrumentation.langchain import LangChainInstrumentor
    except ImportError as error:
        raise ConfigError(
            "instrument_frameworks() needs the package openinference-instrumentation-langchain;"
            " install it, or leave the call out"
        ) from error
    instrumentor = LangChainInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()
    set_recorder(instrumentor.get_span)


def set_recorder(recorder: Callable[[UUID], Any] | None) -> None:
    """Let another tracer record the steps; `recorder` returns its span of a run."""
    global _recorder
    _recorder = recorder


@cache
def _register() -> None:
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.tracers.context import register_configure_hook

    class StepHandler(BaseCallbackHandler):  # type: ignore[misc, unused-ignore]
        """Logs steps inside attempts."""

        run_inline = True  # in the context of the step, which contains the attempt
        ignore_retriever = ignore_custom_event = True

        def on_chain_start(self, serialized: Any, inputs: Any, **about: Any) -> None:
            log = attempt_log.current()
            if log is not None:
                name = str(about.get("name") or "chain")
                named = (about.get("metadata") or {}).get("lc_agent_name")
                _enter(log, name, "agent" if name in (GRAPH, named) else "chain", about)

        def on_tool_start(self, serialized: Any, input_str: str, **about: Any) -> None:
            log = attempt_log.current()
            if log is not None:
                name = about.get("name") or (serialized or {}).get("name") or "tool"
                _enter(log, str(name), "tool", about)

        def on_chain_end(self, outputs: Any, **about: Any) -> None:
            _leave(about)

        def on_chain_error(self, error: BaseException, **about: Any) -> None:
            _leave(about, error)

        on_tool_end, on_tool_error = on_chain_end, on_chain_error

        def on_llm_start(self, serialized: Any, prompts: Any, **about: Any) -> None:
            outer = about.get("parent_run_id")
            attempt_log.model_step.set(outer and step_id(outer))

        def on_llm_end(self, response: Any, **about: Any) -> None:
            attempt_log.model_step.set(None)

        def on_llm_error(self, error: BaseException, **about: Any) -> None:
            attempt_log.model_step.set(None)  # because `about` also has a `response`

        on_chat_model_start = on_llm_start

    everywhere = ContextVar("agentrl_steps", default=StepHandler())  # noqa: B039 - it has no state
    register_configure_hook(everywhere, inheritable=True)


def _enter(log: AttemptLog, name: str, kind: str, about: Mapping[str, Any]) -> None:
    run = about["run_id"]
    outer = about.get("parent_run_id")
    recorder = _recorder

    def recorded() -> str | None:
        span = recorder(run) if recorder is not None else None
        return None if span is None else format(span.get_span_context().span_id, "016x")

    log.enter(step_id(run), name, kind, outer and step_id(outer), recorder and recorded)


def _leave(about: Mapping[str, Any], error: BaseException | None = None) -> None:
    log = attempt_log.current()
    if log is not None:
        attributes = {} if error is None else {"exception.type": type(error).__name__}
        log.leave(step_id(about["run_id"]), error is None, attributes)
