from agentrl.cli.main import main

main()
