#!/usr/bin/env bash
# A real S3 server for the tests: Ceph's RADOS gateway with one monitor and one OSD, on loopback only.
#
#     rgw.sh start DIR PORT     prints the endpoint's URL once it answers; a DIR that was used before has its data again
#     rgw.sh stop DIR           ends what runs on DIR, and is content if nothing does
#
# Users: key tierkv, secret tierkvsecret; and other, othersecret, who may not use the first one's buckets.
set -euo pipefail

usage() {
    echo "usage: rgw.sh start DIR PORT | stop DIR" >&2
    exit 2
}

# Process ids of what runs on this DIR. Daemons are found by their arguments, not by pid files: those may be missing, or
# older than a reboot.
running() {
    local path args
    for path in /proc/[0-9]*; do
        mapfile -d '' -t args <"$path/cmdline" || continue
        for arg in "${args[@]}"; do
            [[ $arg == "$conf" ]] && echo "${path#/proc/}" && break
        done
    done 2>/dev/null
    true
}

stop() {
    local pids tries
    for tries in {1..100}; do
        pids=$(running)
        [[ -z $pids ]] && return
        # The gateway first, while it can still finish its requests; whoever is left after eight seconds is killed.
        if ((tries == 1)); then kill $pids 2>/dev/null || true; fi
        if ((tries >= 80)); then kill -9 $pids 2>/dev/null || true; fi
        sleep 0.1
    done
    echo "rgw.sh: still running on $dir: $pids" >&2
    return 1
}

fail() {
    echo "rgw.sh: $1; the logs in $dir/log end with:" >&2
    tail -n 15 "$dir"/log/* >&2 || true
    stop || true
    exit 1
}

# A port that is free, below those that the system hands out to clients.
free_port() {
    python3 - <<'PY'
import random, socket
while True:
    port = random.randrange(12000, 30000)
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
    print(port)
    break
PY
}

# bluestore, because what it has acknowledged is there again after any stop; memstore keeps all objects in memory and
# writes them out only when it is closed properly. Both start equally fast. `block` is a sparse file: it takes what is stored.
configure() {
    mkdir -p "$dir"/{mon,osd,rgw,run,log}
    local fsid monitor
    fsid=$(cat /proc/sys/kernel/random/uuid)
    monitor="v2:127.0.0.1:$(free_port)"
    cat >"$conf.new" <<CONF
[global]
fsid = $fsid
mon host = $monitor
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
keyring = $dir/keyring
mon data = $dir/mon
osd data = $dir/osd
rgw data = $dir/rgw
run dir = $dir/run
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
crash dir = $dir/run
log file = $dir/log/\$name.log
mon cluster log file = $dir/log/cluster.log

# One copy of everything, on a disk that may be nearly full.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 2
mon warn on insecure global id reclaim allowed = false
auth allow insecure global id reclaim = false

[osd]
keyring = $dir/osd/keyring
osd objectstore = bluestore
bluestore block size = $((20 << 30))
bluestore fsck on mount = false
osd memory target = $((1 << 30))
osd op num shards = 2

[client.rgw]
rgw thread pool size = 64
rgw dynamic resharding = false
rgw override bucket index max shards = 1
rgw enable usage log = false
CONF
    monmaptool --create --clobber --addv a "[$monitor]" --fsid "$fsid" "$dir/monmap"
    ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
    ceph-authtool "$dir/keyring" --gen-key -n client.rgw --cap mon 'allow rw' --cap osd 'allow rwx'
    ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring" -c "$conf.new"
}

make_osd() {
    local uuid key
    uuid=$(cat /proc/sys/kernel/random/uuid)
    key=$(ceph-authtool --gen-print-key)
    echo "{\"cephx_secret\": \"$key\"}" | ceph -c "$conf" --connect-timeout 20 osd new "$uuid" 0 -i -
    printf '[osd.0]\n\tkey = %s\n' "$key" >"$dir/osd/keyring"
    ceph-osd --mkfs -i 0 --osd-uuid "$uuid" -c "$conf"
}

make_users() {
    local user
    for user in tierkv other; do
        radosgw-admin -c "$conf" user create --uid "$user" --display-name "$user" \
            --access-key "$user" --secret-key "${user}secret"
    done
}

start() {
    local port=$1 url="http://127.0.0.1:$1" missing=() program tries
    for program in ceph-mon ceph-osd radosgw ceph; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if ((${#missing[@]})); then
        echo "rgw.sh: not found: ${missing[*]}; on Debian and Ubuntu:" \
            "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common" >&2
        exit 1
    fi
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        echo "rgw.sh: something listens on 127.0.0.1:$port already" >&2
        exit 1
    fi
    [[ -z $(running) ]] || fail "$dir is in use already"

    local setup="$dir/log/setup.log"
    # What a start that failed half way has left is of no use.
    [[ -e $dir/complete ]] || rm -rf "$dir"/{mon,osd,rgw,run,log,ceph.conf*}
    mkdir -p "$dir/log"
    echo "$(date +%T.%N) start" >>"$setup"
    if [[ ! -e $dir/complete ]]; then
        configure >>"$setup" 2>&1 || fail "no monitor could be made"
        mv "$conf.new" "$conf"
    fi
    ceph-mon -i a -c "$conf" >>"$setup" 2>&1 </dev/null || fail "the monitor does not start"
    echo "$(date +%T.%N) mon" >>"$setup"
    if [[ ! -e $dir/complete ]]; then
        make_osd >>"$setup" 2>&1 || fail "no OSD could be made"
    fi
    echo "$(date +%T.%N) mkosd" >>"$setup"
    ceph-osd -i 0 -c "$conf" >>"$setup" 2>&1 </dev/null || fail "the OSD does not start"
    echo "$(date +%T.%N) osd" >>"$setup"
    radosgw -n client.rgw -c "$conf" --rgw-frontends "beast endpoint=127.0.0.1:$port tcp_nodelay=1" \
        >>"$setup" 2>&1 </dev/null || fail "the gateway does not start"
    echo "$(date +%T.%N) rgw" >>"$setup"
    for tries in {1..600}; do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        ((tries < 600)) || fail "nothing answers on $url after a minute"
        sleep 0.1
    done
    echo "$(date +%T.%N) answers" >>"$setup"
    if [[ ! -e $dir/complete ]]; then
        make_users >>"$setup" 2>&1 || fail "the users could not be made"
        touch "$dir/complete"
    fi
    echo "$(date +%T.%N) done" >>"$setup"
    echo "$url"
}

[[ $# -ge 2 ]] || usage
dir=$(realpath -m "$2")
conf=$dir/ceph.conf
case "$1:$#" in
    start:3) start "$3" ;;
    stop:2) stop ;;
    *) usage ;;
esac
