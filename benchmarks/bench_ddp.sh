#!/usr/bin/env bash
# Compare DDP programs over a network that is slow on purpose: two ranks in two network namespaces,
# joined by a veth pair that tc shapes. Needs Linux, root and iproute2; without them it says so and
# ends with 0, having measured nothing.
#
#     sudo benchmarks/bench_ddp.sh [--rates "1gbit 10gbit none"] [options of bench_ddp.py]
#
# PYTHON names the interpreter (default: python3). Each rank gets OMP_NUM_THREADS threads (default 1).
set -euo pipefail

rates="1gbit 10gbit none"
if [[ ${1:-} == --rates ]]; then
    rates=$2
    shift 2
fi

skip() {
    echo "bench_ddp.sh: skipped: $1"
    exit 0
}
[[ $(uname) == Linux ]] || skip "network namespaces are Linux's"
[[ $(id -u) == 0 ]] || skip "making network namespaces needs root; run it with sudo"
for tool in ip tc; do
    command -v "$tool" >/dev/null || skip "there is no $tool; install iproute2"
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
spaces=(mpcompile-bench-0-$$ mpcompile-bench-1-$$)
ranks=()

clean_up() {
    for rank in "${ranks[@]}"; do
        kill "$rank" 2>/dev/null || true
    done
    for space in "${spaces[@]}"; do
        ip netns delete "$space" 2>/dev/null || true
    done
}
trap clean_up EXIT

ip netns add "${spaces[0]}" || skip "the kernel makes no network namespaces here"
ip netns add "${spaces[1]}"
ip link add mpbench0 netns "${spaces[0]}" type veth peer name mpbench1 netns "${spaces[1]}"
for rank in 0 1; do
    space=${spaces[$rank]}
    ip -n "$space" address add "10.213.0.$((rank + 1))/24" dev "mpbench$rank"
    ip -n "$space" link set "mpbench$rank" up
    ip -n "$space" link set lo up
done

for rate in $rates; do
    label="unshaped link"
    for rank in 0 1; do
        tc -n "${spaces[$rank]}" qdisc delete dev "mpbench$rank" root 2>/dev/null || true
        if [[ $rate != none ]]; then
            label="link of $rate/s"
            tc -n "${spaces[$rank]}" qdisc add dev "mpbench$rank" root \
                tbf rate "$rate" burst 1mb latency 50ms
        fi
    done
    ranks=()
    for rank in 1 0; do
        ip netns exec "${spaces[$rank]}" env \
            RANK="$rank" WORLD_SIZE=2 MASTER_ADDR=10.213.0.1 MASTER_PORT=29511 \
            GLOO_SOCKET_IFNAME="mpbench$rank" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
            "$python" "$root/benchmarks/bench_ddp.py" \
            --interface "mpbench$rank" --label "$label" "$@" &
        ranks+=($!)
    done
    for rank in "${ranks[@]}"; do
        wait "$rank"
    done
    ranks=()
done
