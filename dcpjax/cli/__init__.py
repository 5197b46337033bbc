"""The command line: reads options, shows progress, and turns wrong settings into exit code 2."""

from dcpjax.cli.commands import main as main
