"""Harbor's tasks in real containers: what solves them scores full marks, what does not scores by
their tests, and what cannot be judged has no score."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.environments.hosted import check
from agentrl.environments.runner import played_environment
from agentrl.harbor import Harbor, clean
from agentrl.runners.executors.containers import Containers
from tests.agentrl.harbor.folders import Scripted, write_task
from tests.runners.executors.real import ENGINE, needs_podman, podman

pytestmark = [needs_podman, pytest.mark.timeout(300)]
DOCKERFILE = "environment/Dockerfile"
SHARED = '[environment]\nnetwork_mode = "no-network"\n'
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


class Rollouts:
    """Plays tasks of a folder."""

    def __init__(self, folder: Path, image: str) -> None:
        self.folder, self.image = folder, image
        self.started: dict[Any, asyncio.Task[Containers]] = {}
        self.told = ""  # the policy's last prompt ended with it
        self.calls = 0

    def write(self, changed: dict[str, Any] | None = None, name: str = "t") -> None:
        built = {DOCKERFILE: f"FROM {self.image}\nWORKDIR /app\n", **(changed or {})}
        write_task(self.folder / name, {k: _from(v, self.image) for k, v in built.items()})

    async def __call__(
        self, *replies: Any, name: str = "t", given: Any = None, **options: Any
    ) -> dict[str, float]:
        """Without replies, those of the solution."""
        environment = Harbor(str(self.folder), cli=ENGINE, warm=0, heldout=[], **options)
        tasks = {task["id"]: task["input"] for task in environment.tasks("train")}
        policy: Any = Scripted(given or replies or environment.solution(tasks[name]) or [])
        environment._started = self.started
        try:
            return await environment.run(tasks[name], policy)
        finally:
            self.calls = len(policy.asked)
            self.told = policy.told if policy.asked else ""


def _from(text: Any, image: str) -> Any:
    return text.replace("FROM BASE", f"FROM {image}") if isinstance(text, str) else text


@pytest.fixture
async def rollout(tmp_path: Path, real: str) -> AsyncIterator[Rollouts]:
    rollouts = Rollouts(tmp_path / "tasks", real)
    yield rollouts
    for task in rollouts.started.values():
        await (await task).close()


async def test_a_solution_scores_full_marks_and_nothing_scores_by_the_tests(rollout: Any) -> None:
    rollout.write()
    assert await rollout() == {"outcome": 1.0}
    assert await rollout("I do nothing.") == {"outcome": 0.0}
    assert await rollout(["echo hullo > hello.txt"], "Done.") == {"outcome": 0.0}
    assert await rollout(["echo hello > hello.txt", "cat hello.txt"]) == {"outcome": 1.0}
    assert rollout.told == "hello"


async def test_absolute_paths_binaries_and_several_rewards(rollout: Any) -> None:
    image = bytes(range(256))
    check = """#!/bin/sh
bytes() { od -An -v -tx1 "$1" | tr -d ' \\n'; }
[ "$(bytes /app/logo.bin)" = "$(bytes /tests/want.bin)" ] && a=1 || a=0
[ -s /opt/made ] && b=0.5 || b=0
echo "{\\"reward\\": $a, \\"made\\": $b}" > /logs/verifier/reward.json
echo 7 > /logs/verifier/reward.txt
"""
    rollout.write(
        {
            DOCKERFILE: "FROM BASE\nWORKDIR /app\nCOPY logo.bin ./\nRUN echo built > /opt_made\n",
            "environment/logo.bin": image,
            "tests/want.bin": image[::-1],
            "tests/test.sh": check,
            "solution/data.bin": image[::-1] * 800,  # in more than one command
            "solution/solve.sh": "#!/bin/sh\nhead -c 256 /solution/data.bin > /app/logo.bin\n"
            "mkdir -p /opt && cat /opt_made > /opt/made\n",
        }
    )
    assert await rollout() == {"outcome": 1.0, "made": 0.5}
    assert await rollout("Nothing.") == {"outcome": 0.0, "made": 0.0}
    assert await rollout(outcome="made") == {"outcome": 0.5, "reward": 1.0}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({DOCKERFILE: "FROM BASE\nRUN false\n"}, "cannot be built"),
        ({DOCKERFILE: "FROM localhost/there-is-none:1\n"}, "cannot be built"),
        ({DOCKERFILE: "FROM scratch\nCOPY Dockerfile /\n"}, "cannot start"),
        ({"tests/test.sh": "#!/bin/sh\necho broken tests >&2\n"}, "wrote no reward.*broken tests"),
        ({"tests/test.sh": "#!/bin/nowhere\n"}, "wrote no reward"),
        ({"tests/test.sh": "#!/bin/sh\necho nan > /logs/verifier/reward.txt\n"}, "not a finite"),
        (
            {
                "task.toml": f"{SHARED}[verifier]\ntimeout_sec = 1\n",
                "tests/test.sh": "#!/bin/sh\nsleep 50\n",
            },
            "tests ran longer than 1 s",
        ),
        ({"task.toml": f"{SHARED}[verifier.env]\nX = '${{HARBOR_GONE}}'\n"}, "HARBOR_GONE"),
        (
            {"task.toml": f"{SHARED}[environment.healthcheck]\ncommand = 'false'\nretries = 1\n"},
            "not healthy",
        ),
    ],
)
async def test_what_cannot_be_judged_is_a_sentence_and_no_reward(
    rollout: Any, changed: dict[str, Any], says: str
) -> None:
    rollout.write(changed)
    with pytest.raises(AgentRLError, match=says) as error:
        await rollout()
    if "HARBOR_GONE" not in says:
        assert "the Harbor task 't'" in str(error.value)
    assert "\n" not in str(error.value)


async def test_an_agent_that_kills_all_that_it_can_is_judged(rollout: Any) -> None:
    rollout.write()
    solved = ["echo hello > hello.txt; kill -9 1; kill -15 1; kill -9 -1"]
    assert await rollout(solved, "Done.") == {"outcome": 1.0}


async def test_a_container_that_is_gone_is_no_score(rollout: Any, tmp_path: Path) -> None:
    rollout.write({DOCKERFILE: f"FROM BASE\nWORKDIR /app\nLABEL harbor-test={tmp_path}\n"})

    def replies() -> Iterator[Any]:
        yield ["true"]
        found = podman("ps", "--quiet", "--filter", f"label=harbor-test={tmp_path}").stdout
        podman("rm", "--force", *found.decode().split())
        yield ["true"]

    with pytest.raises(AgentRLError, match="the Harbor task 't': the container is gone"):
        await rollout(given=replies())


async def test_what_an_agent_left_for_its_tests_is_not_read(rollout: Any) -> None:
    rollout.write({"tests/test.sh": "#!/bin/sh\nexit 1\n"})
    with pytest.raises(AgentRLError, match="wrote no reward"):
        await rollout(["echo 1 > /logs/verifier/reward.txt; ln -s /etc/passwd /logs/verifier/x"])


async def test_the_agents_time_is_up_and_what_it_did_is_judged(rollout: Any) -> None:
    rollout.write({"task.toml": f"{SHARED}[agent]\ntimeout_sec = 2\n"})
    assert await rollout(["echo hello > hello.txt; sleep 60"], ["rm hello.txt"]) == {"outcome": 1.0}
    assert rollout.calls == 1


async def test_a_command_has_its_own_time_and_a_model_may_be_wrong(rollout: Any) -> None:
    rollout.write()
    wrong = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{"}}
    bad = {"role": "assistant", "content": "", "tool_calls": [wrong]}
    assert await rollout(bad, "Done.") == {"outcome": 0.0}
    assert "one tool, bash" in rollout.told
    await rollout(["echo \ud83d"], "Done.")  # as a model may cut an emoji
    assert "one tool, bash" in rollout.told
    await rollout(["sleep 60"], "Done.", command_timeout=1.0)
    assert "longer than 1 s" in rollout.told
    await rollout(["seq 1 5000; false"], "Done.", output=100)
    assert "characters are left out" in rollout.told
    assert rollout.told.endswith("(exit status 1)")
    assert await rollout(*[["true"]] * 9, turns=3) == {"outcome": 0.0}
    assert rollout.calls == 3


async def test_settings_of_the_container(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_HERE", "here")
    table = f"""{SHARED}workdir = "/opt"
env = {{ A = "${{HARBOR_HERE}}" }}
[agent]
user = 65534
[verifier]
env = {{ B = "b" }}
"""
    check = (
        '#!/bin/sh\n[ "$A$B$(pwd)$(id -u)" = hereb/opt0 ] && echo 1 > /logs/verifier/reward.txt\n'
    )
    rollout.write(
        {"task.toml": table, DOCKERFILE: "FROM BASE\nRUN mkdir /opt\n", "tests/test.sh": check}
    )
    given = {"variables": ["HARBOR_HERE"]}
    assert await rollout(['echo "$A$B $(pwd) $(id -u)"'], "Done.", **given) == {"outcome": 1.0}
    assert rollout.told == "here /opt 65534"


async def test_memory_and_disk_are_limited(rollout: Any) -> None:
    rollout.write({"task.toml": f"{SHARED}memory_mb = 32\n"})
    eats = ["tail /dev/zero; echo hello > hello.txt"]
    assert await rollout(eats, "Done.") == {"outcome": 1.0}  # only what ate it was ended
    rollout.write()
    fills = ["dd if=/dev/zero of=/app/full bs=1M count=64; sleep 60"]
    with pytest.raises(AgentRLError, match=r"the Harbor task 't': .*16 MB"):
        await rollout(fills, "Done.", disk_mb=16)


async def test_there_is_no_network_if_the_task_says_so(rollout: Any) -> None:
    rollout.write()
    await rollout(["ip link | grep -c UP; ls /sys/class/net"], "Done.")
    assert rollout.told.split()[1:] == ["lo"]


async def test_an_images_entry_point_starts_its_services(rollout: Any) -> None:
    entry = 'ENTRYPOINT ["sh", "-c", "echo up > /app/service; exec \\"$@\\"", "sh"]'
    check = "#!/bin/sh\ncp /app/service /logs/verifier/ && echo 1 > /logs/verifier/reward.txt\n"
    health = f"{SHARED}[environment.healthcheck]\ncommand = 'test -s /app/service'\n"
    health += "interval_sec = 0.2\nretries = 50\n"
    rollout.write(
        {
            "task.toml": health,
            DOCKERFILE: f"FROM BASE\nWORKDIR /app\n{entry}\n",
            "tests/test.sh": check,
        }
    )
    assert await rollout("Done.") == {"outcome": 1.0}


STEPS = f"""{SHARED}
[[steps]]
name = "one"
min_reward = 1.0
[[steps]]
name = "two"
"""


def steps(two: str = "[ -e set ]") -> dict[str, Any]:
    score = "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    return {
        "task.toml": STEPS,
        "instruction.md": None,
        "tests/test.sh": None,
        "steps/one/instruction.md": "Write one.",
        "steps/one/tests/test.sh": f"#!/bin/sh\n[ -e /app/one ] {score}\n",
        "steps/one/tests/answer": "one",
        "steps/one/solution/solve.sh": "#!/bin/sh\ntouch one\n",
        "steps/two/instruction.md": "Write two.",
        "steps/two/tests/test.sh": f"#!/bin/sh\n{two} && [ -e /app/one ] && [ -e two ] {score}\n",
        "steps/two/solution/solve.sh": "#!/bin/sh\ntouch two\n",
        "steps/two/workdir/setup.sh": "touch set\n",
        "steps/two/workdir/data/x": "x",
    }


@pytest.mark.slow
async def test_steps_follow_each_other_in_one_container(rollout: Any) -> None:
    rollout.write(steps())
    assert await rollout() == {"outcome": 1.0}
    assert await rollout(["touch one"], "Done.", "Done.") == {"outcome": 0.5}
    assert await rollout("I do nothing.") == {"outcome": 0.0}
    assert rollout.calls == 1  # the second step needs the first one's reward
    hidden = ["ls /tests /logs/verifier; cat data/x"]
    await rollout(["touch one"], "Done.", hidden, "Done.")
    assert "answer" not in rollout.told
    assert "reward" not in rollout.told
    assert rollout.told.endswith("x")
    rollout.write(steps() | {"task.toml": f'multi_step_reward_strategy = "final"\n{STEPS}'})
    assert await rollout(["touch one"], "Done.", "Done.") == {"outcome": 0.0}


async def test_setup_that_fails_is_no_score(rollout: Any) -> None:
    rollout.write(steps() | {"steps/two/workdir/setup.sh": "echo no setup >&2; exit 3\n"})
    with pytest.raises(AgentRLError, match=r"setup\.sh of its step 'two' failed: no setup"):
        await rollout()


APART = f"""artifacts = ["/app/out", {{ source = "sub", exclude = ["*.log"] }}]
{SHARED}
{SEPARATE}
[[verifier.collect]]
command = "cp /app/state /app/out/state"
"""
JUDGE = """#!/bin/sh
cd /app
ls -R out sub > /logs/verifier/seen
good=0
if [ "$(cat out/answer)" = 42 ] && [ -s sub/a.txt ] && [ -s out/state ]; then good=1; fi
for name in secret sub/a.log out/old; do if [ -e "$name" ]; then good=0; fi; done
echo $good > /logs/verifier/reward.txt
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
async def test_a_separate_verifier_gets_artifacts_and_nothing_else(rollout: Any, own: bool) -> None:
    solve = """#!/bin/sh
mkdir -p out sub; echo 42 > out/answer; echo s > secret; echo a > sub/a.txt; echo l > sub/a.log
echo x > state; rm -f out/old
# what reaches the verifier's container must not reach its answers
ln -s /tests/test.sh out/link; printf '#!/bin/sh\\nexit 0\\n' > /bin/cat2
"""
    rollout.write(
        {
            "task.toml": APART,
            DOCKERFILE: "FROM BASE\nWORKDIR /app\nRUN mkdir out && echo o > out/old\n",
            "tests/test.sh": JUDGE,
            "tests/Dockerfile": "FROM BASE\nWORKDIR /app\nCOPY . /tests/\n" if own else None,
            "solution/solve.sh": solve,
        }
    )
    assert await rollout() == {"outcome": 1.0}
    assert await rollout("Nothing.") == {"outcome": 0.0}
    cheat = ["mkdir -p out; ln -s /tests/test.sh out/answer; echo 1 > /logs/verifier/reward.txt"]
    assert await rollout(cheat, "Done.") == {"outcome": 0.0}


async def test_a_program_of_the_image_is_the_agent(rollout: Any) -> None:
    checks = '[ "$(cat)" = "$HARBOR_INSTRUCTION" ] && [ -n "$OPENAI_API_KEY" ]'
    program = f"sh -c '{checks} && echo hello > hello.txt'"
    rollout.write()
    assert await rollout(command=program) == {"outcome": 1.0}
    with pytest.raises(AgentRLError, match="exit status 3: no model"):
        await rollout(command=["sh", "-c", "echo no model >&2; exit 3"])


PRESET = """program = "my-harness"
argv = ["--prompt", "{prompt}", "--context", "{context}"]
env = { MODEL_KEY = "{key}" }
match = [{ role = "title", system = "Name*" }]
[files]
".mine/config" = "{root}"
"""
MY_HARNESS = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "--prompt Write hello to hello.txt. --context 999 --more" ] || exit 4
[ "$(cat $HOME/.mine/config)/v1" = "$OPENAI_BASE_URL" ] && [ "$MODEL_KEY" = key ] || exit 5
[ "$PWD" = /app ] && touch "$HOME/.mine/own" || exit 6
echo hello > hello.txt
"""


async def test_a_harness_of_the_image_is_the_agent(rollout: Any, tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text(PRESET)
    rollout.write(
        {
            DOCKERFILE: "FROM BASE\nWORKDIR /app\nCOPY my-harness /bin/\n"
            "RUN chmod 777 /app && chmod 755 /bin/my-harness\n",
            "environment/my-harness": MY_HARNESS,
            "task.toml": f"{SHARED}[agent]\nuser = 65534\n",
        }
    )
    options = {"harness": str(preset), "args": ["--more"]}
    assert await rollout(context=999, **options) == {"outcome": 1.0}
    with pytest.raises(AgentRLError, match="exit status 4"):
        await rollout(context=5, **options)
    for wrong in ({"command": "x", "harness": str(preset)}, {"args": ["--more"]}):
        with pytest.raises(ConfigError, match="harness"):
            Harbor("tasks", **wrong)


def test_calls_of_a_harness_that_are_not_its_agents_have_roles(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(PRESET)
    write_task(tmp_path / "tasks" / "t")
    data = {"name": "t", "environment": "harbor:tasks", "root": str(tmp_path)}
    config = resolve(data | {"environment_options": {"harness": "mine.toml"}}, source="test")
    environment = played_environment(config, tmp_path)
    assert environment is not None
    (rule,) = environment.role_rules
    assert rule.role == "title"
    refused = resolve(data | {"agent": {"harness": "codex"}}, source="test")
    with pytest.raises(ConfigError, match=r"move harness = 'codex' to \[environment_options\]"):
        check(refused)


async def test_a_folder_that_changes_under_a_run_is_said(rollout: Any) -> None:
    rollout.write()
    environment = Harbor(str(rollout.folder), heldout=[])
    (task,) = environment.tasks("train")
    (rollout.folder / "t" / "tests" / "test.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="has changed"):
        await environment.run(task["input"], Scripted([]))  # type: ignore[arg-type]


def test_splits_and_what_cannot_be_run(rollout: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abcdefg":
        rollout.write(name=name)
    rollout.write({"environment/docker-compose.yaml": "services: {}"}, "x")

    def ids(**options: Any) -> list[list[str]]:
        environment = Harbor(str(rollout.folder), **options)
        return [[str(row["id"]) for row in environment.tasks(s)] for s in ("train", "heldout")]

    assert ids() == [["a", "b", "c", "d", "f", "g"], ["e"]]
    assert "left out: the Harbor task 'x' needs several containers" in caplog.text
    assert ids(heldout=["[fg]"]) == [["a", "b", "c", "d", "e"], ["f", "g"]]
    for name in "abcdefg":
        shutil.rmtree(rollout.folder / name)
    with pytest.raises(ConfigError, match="can be run here: the Harbor task 'x'"):
        ids()


def test_copies_for_the_verifier_are_cleaned(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "sub").mkdir(parents=True)
    (copy / "sub" / "run").write_text("x")
    (copy / "sub" / "run").chmod(0o4755)
    (copy / "in").symlink_to("sub/run")
    (copy / "out").symlink_to("../secret")
    (copy / "abs").symlink_to("/etc/passwd")
    os.mkfifo(copy / "pipe")
    assert clean(copy, ["./gone", "*.log"]) == "folder"
    left = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*"))
    assert left == ["in", "sub", "sub/run"]
    assert (copy / "sub" / "run").stat().st_mode & 0o7777 == 0o755
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    assert clean(link) == ""
