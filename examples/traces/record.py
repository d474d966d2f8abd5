"""Records traces of the agent as LangSmith's client sends them:

python record.py recorded.jsonl --count 500

The expert answers on this machine, which also stands for LangSmith. A fifth of the traces have a
mistake in one of the three nodes; the feedback `correct` says which, as a reviewer would.
"""

import argparse
import json
import os
import random
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

from server import Server

SESSION = "00000000-0000-0000-0000-000000000001"  # LangSmith's project


def record(path: Path, count: int, seed: int) -> int:
    """Write the runs and the feedback; returns the number of traces without a mistake."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none"}
    Server.slips = random.Random(seed)
    import expert
    from agent import agent
    from langchain_core.tracers import LangChainTracer
    from langsmith import Client
    from orders import decision_of, message, record_of

    client = Client(api_url=address, api_key="none", auto_batch_tracing=False)
    drawn, good = random.Random(seed), 0
    for _ in range(count):
        text, order, problem = message(drawn)
        tracer = LangChainTracer(client=client)
        result = agent.invoke({"message": text}, {"callbacks": [tracer]})
        right = decision_of(problem, record_of(order))
        correct = result["reply"] == expert.DECISIONS[right].format(order)
        good += correct
        about = {
            "key": "correct",
            "session_id": SESSION,
            "start_time": tracer.latest_run.start_time,
        }
        client.create_feedback(tracer.latest_run.id, score=float(correct), **about)
    rows = [*Server.runs.values(), *Server.feedback]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.shutdown()
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    good = record(given.out, given.count, given.seed)
    print(f"{given.out}: {given.count} traces, {good} of them correct")
