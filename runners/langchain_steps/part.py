from agentrl.base.parts import Part

HERE = "agentrl.runners.langchain_steps.steps"

PART = Part(
    name="LangChain steps",
    summary="Record the steps of LangChain and LangGraph agents; graph nodes are roles of calls.",
    tracing={"langchain": f"{HERE}:install"},
    runner={"runner.framework_spans": f"{HERE}:join"},
)
