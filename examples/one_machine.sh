#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One machine: an encoding vLLM, a decoding vLLM and the router before them. Ctrl-C ends all three.
#
#   MODEL=Qwen/Qwen2-VL-2B-Instruct examples/one_machine.sh
#
# Then ask port 8000 as you would ask one vLLM. Two GPUs: PRODUCER_GPU=0 CONSUMER_GPU=1.
set -euo pipefail

: "${MODEL:?set MODEL to a model that vLLM can serve}"
SERVE=${SERVE:-vllm serve}
EC='{"ec_connector": "ECPoolConnector", "ec_role": "%s"}'

cleanup() { kill $(jobs -p) 2>/dev/null || true; wait; }
trap cleanup EXIT

on_gpu() { [ -z "$1" ] || echo "CUDA_VISIBLE_DEVICES=$1"; }  # left alone where none is named

env $(on_gpu "${PRODUCER_GPU:-}") \
  $SERVE "$MODEL" --port 8101 --ec-transfer-config "$(printf "$EC" ec_producer)" &
env $(on_gpu "${CONSUMER_GPU:-}") \
  $SERVE "$MODEL" --port 8102 --ec-transfer-config "$(printf "$EC" ec_consumer)" &
ec-connector proxy --encode http://127.0.0.1:8101 --decode http://127.0.0.1:8102 --port 8000 &
wait -n
