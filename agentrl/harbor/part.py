from agentrl.base.parts import Part

PART = Part(
    name="Harbor tasks",
    summary='Harbor\'s tasks, run in their containers: `environment = "harbor:FOLDER"`.',
    uses=("containers", "environments", "harnesses", "processes", "tasks with tests"),
    runner={"environment_options.harness": "agentrl.harbor.hooks:join"},
    environments={"harbor": "agentrl.harbor.plugin:Harbor"},
)
