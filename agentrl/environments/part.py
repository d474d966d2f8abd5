from agentrl.base.parts import Part

HERE = "agentrl.environments"

PART = Part(
    name="environments",
    summary='Environments that people already have: `environment = "PLUGIN:WHAT"`.',
    uses=("processes",),
    tables={
        "environment": f"{HERE}.table:Name",
        "environment_options": f"{HERE}.table:Options",
    },
    derives={"environment": f"{HERE}.settings:derive"},
    checks={"environment": f"{HERE}.settings:check"},
    references={"environment": f"{HERE}.reference:resolve"},
    runner={"environment": f"{HERE}.hooks:join"},
    commands={"env": f"{HERE}.command:env"},
    environments={
        "inspect": f"{HERE}.plugins.inspect:Inspect",
        "openai-evals": f"{HERE}.plugins.evals:Evals",
        "reasoning-gym": f"{HERE}.plugins.reasoning_gym:ReasoningGym",
        "tau2": f"{HERE}.plugins.tau2:Tau2",
        "verifiers": f"{HERE}.plugins.verifiers:Verifiers",
        "verifiers-v1": f"{HERE}.plugins.verifiers_v1:VerifiersV1",
    },
)
