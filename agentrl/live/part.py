from agentrl.base.parts import Part

HERE = "agentrl.live"

PART = Part(
    name="live",
    summary="Serve an agent's model, learn from its sessions, and move traffic to better versions.",
    uses=("evaluation", "judges", "processes", "view"),
    needs=("sessions",),
    outputs=("versions", "heldout", "watch.json"),
    tables={"live": f"{HERE}.records.table:LiveConfig"},
    commands={
        "live": f"{HERE}.command:live",
        "live status": f"{HERE}.lanes.command:status",
        "live promote": f"{HERE}.lanes.command:promote",
        "live rollback": f"{HERE}.lanes.command:rollback",
        "live offer": f"{HERE}.lanes.command:offer",
        "live forget": f"{HERE}.people_command:forget",
        "live export": f"{HERE}.people_command:export",
        "live users": f"{HERE}.people_command:users",
    },
    derives={"live": f"{HERE}.records.table:derive"},
    checks={"live": f"{HERE}.records.table:check"},
    training={"live": f"{HERE}.training:join"},
    pages={"versions": f"{HERE}.lanes.pages:VersionsPage"},
)
