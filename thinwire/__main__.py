"""python -m thinwire"""

from thinwire.cli import app

app()
