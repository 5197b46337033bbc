"""The command line: reads options, shows progress, and turns wrong settings into exit code 2."""

from dcpjax.cli.commands import main as main
from dcpjax.cli.plan_command import plan_command
from dcpjax.cli.simulate_command import simulate_command

main.add_command(plan_command)
main.add_command(simulate_command)
