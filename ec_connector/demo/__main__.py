# SPDX-License-Identifier: Apache-2.0
"""``python -m ec_connector.demo``"""

import sys

from ec_connector.demo import main

if __name__ == "__main__":
    sys.exit(main())
