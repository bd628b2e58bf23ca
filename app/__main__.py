import os
import sys

# A forward's threads would spin while they wait for each other, on cores that the transfer needs; on busy
# machines sleeping is twice as fast. Read once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from app.cli import main

sys.exit(main())
