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
    unplaced={"environment": f"{HERE}.settings:unplaced"},
    checks={"environment": f"{HERE}.settings:check"},
    references={"environment": f"{HERE}.reference:resolve"},
    runner={"environment": f"{HERE}.hooks:join"},
    commands={"env": f"{HERE}.commands.env:env"},
    environments={
        "bfcl": f"{HERE}.plugins.bfcl:BFCL",
        "gymnasium": f"{HERE}.plugins.gymnasium:Gymnasium",
        "inspect": f"{HERE}.plugins.inspect:Inspect",
        "minigrid": f"{HERE}.plugins.minigrid:MiniGrid",
        "openai-evals": f"{HERE}.plugins.evals:Evals",
        "openenv": f"{HERE}.plugins.openenv:OpenEnv",
        "pettingzoo": f"{HERE}.plugins.pettingzoo:PettingZoo",
        "reasoning-gym": f"{HERE}.plugins.reasoning_gym:ReasoningGym",
        "tau2": f"{HERE}.plugins.tau2:Tau2",
        "textarena": f"{HERE}.plugins.textarena:TextArena",
        "textworld": f"{HERE}.plugins.textworld:TextWorld",
        "verifiers": f"{HERE}.plugins.verifiers:Verifiers",
        "verifiers-v1": f"{HERE}.plugins.verifiers_v1:VerifiersV1",
    },
)
