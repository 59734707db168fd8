# SPDX-License-Identifier: Apache-2.0
"""``python -m ec_connector.proxy``."""

import sys

from ec_connector.proxy import main

sys.exit(main())
