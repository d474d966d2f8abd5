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
    environments={},
)
