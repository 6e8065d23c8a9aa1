"""`python -m validate.statements`: write the page of statements, or check a part."""

import sys

from validate.statements.campaign import main

sys.exit(main())
