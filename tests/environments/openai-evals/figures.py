from pathlib import Path

from tests.environments.figures import print_figures

print_figures("openai-evals:crontab.dev.v0", Path(__file__).parent)
