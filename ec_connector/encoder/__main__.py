# SPDX-License-Identifier: Apache-2.0
"""``python -m ec_connector.encoder``."""

import sys

from ec_connector.encoder import main

sys.exit(main())
