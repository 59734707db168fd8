#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One machine: two encoding vLLMs, two decoding ones and the router before them. Ctrl-C ends all five.
#
#   MODEL=Qwen/Qwen2-VL-2B-Instruct GPUS="0 1 2 3" examples/two_and_two.sh
#
# Then ask port 8000 as you would ask one vLLM. GPUS: of both producers, then of both consumers.
# Left out, every engine sees all of them.
set -euo pipefail

: "${MODEL:?set MODEL to a model that vLLM can serve}"
SERVE=${SERVE:-vllm serve}
read -ra GPUS <<< "${GPUS:-}"

# Every port is named: what listens for HTTP, and what producers serve encodings on. A consumer
# dials those two alone, and listens for nobody.
PRODUCER='{"ec_connector": "ECPoolConnector", "ec_role": "ec_producer", "ec_port": %d}'
CONSUMER='{"ec_connector": "ECPoolConnector", "ec_role": "ec_consumer",
  "ec_connector_extra_config": {"allow_peers": ["127.0.0.1:15001", "127.0.0.1:15002"]}}'

cleanup() { kill $(jobs -p) 2>/dev/null || true; wait; }
trap cleanup EXIT

engine() {  # which of the four, HTTP port, its --ec-transfer-config
  [ -z "${GPUS[$1]:-}" ] || export CUDA_VISIBLE_DEVICES=${GPUS[$1]}
  exec $SERVE "$MODEL" --host 127.0.0.1 --port "$2" --ec-transfer-config "$3"
}

engine 0 8101 "$(printf "$PRODUCER" 15001)" &
engine 1 8102 "$(printf "$PRODUCER" 15002)" &
engine 2 8201 "$CONSUMER" &
engine 3 8202 "$CONSUMER" &
ec-connector proxy --host 127.0.0.1 --port 8000 \
  --encode http://127.0.0.1:8101 http://127.0.0.1:8102 \
  --decode http://127.0.0.1:8201 http://127.0.0.1:8202 &
wait -n
