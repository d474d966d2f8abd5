"""The learning side: loop, credit, objectives, batching, learners, policy servers."""
