from agentrl.base.parts import Part

PART = Part(
    name="Harbor tasks",
    summary='Harbor\'s tasks, run in their containers: `environment = "harbor:FOLDER"`.',
    uses=("containers", "environments", "harnesses", "processes", "tasks with tests"),
    environments={"harbor": "agentrl.harbor.plugin:Harbor"},
)
