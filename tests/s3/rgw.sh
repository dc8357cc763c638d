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

# Process ids of what runs on this DIR, of one program if it is named. They are found by their arguments and not by pid
# files, which may be missing, or older than the machine's last start.
running() {
    local path args
    for path in /proc/[0-9]*; do
        mapfile -d '' -t args 2>/dev/null <"$path/cmdline" || continue
        if [[ " ${args[*]} " == *" -c $conf "* && ${args[0]##*/} == ${1:-*} ]]; then echo "${path#/proc/}"; fi
    done 2>/dev/null
}

# Each needs the next one to leave in order: a gateway that could not tell the OSD is waited for after the next start, for
# half a minute in which no bucket can be made.
stop() {
    local program tries
    for program in radosgw ceph-osd ceph-mon; do
        kill $(running $program) 2>/dev/null || true
        for tries in {1..50}; do
            [[ -n $(running $program) ]] || break
            sleep 0.1
        done
    done
    kill -9 $(running) 2>/dev/null || true
    for tries in {1..50}; do
        [[ -n $(running) ]] || return 0
        sleep 0.1
    done
    echo "rgw.sh: still running on $dir: $(running)" >&2
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
# writes them out only when it is closed properly. Both start equally fast. The device is a sparse file, which takes as
# much of the disk as is stored.
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
# The monitor collects changes for a second before it decides on them, and each new pool is a few of those.
paxos propose interval = 0.05
paxos min wait = 0.01
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
# After a kill, no bucket can be made for so long: the gateway of before is still asked whether it knows of it.
osd client watch timeout = 10

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
    if [[ -n $(running) ]]; then
        echo "rgw.sh: $dir is in use; stop it first" >&2
        exit 1
    fi

    local setup="$dir/log/setup.log"
    # What a start that failed half way has left is of no use.
    [[ -e $dir/complete ]] || rm -rf "$dir"/{mon,osd,rgw,run,log,ceph.conf*}
    mkdir -p "$dir/log"
    if [[ ! -e $dir/complete ]]; then
        configure >>"$setup" 2>&1 || fail "no monitor could be made"
        mv "$conf.new" "$conf"
    fi
    ceph-mon -i a -c "$conf" >>"$setup" 2>&1 </dev/null || fail "the monitor does not start"
    if [[ ! -e $dir/complete ]]; then
        make_osd >>"$setup" 2>&1 || fail "no OSD could be made"
    fi
    # A gateway that looks for an OSD where there is none (any more) waits for ten seconds before it looks again.
    ceph -c "$conf" --connect-timeout 20 osd down 0 >>"$setup" 2>&1 || fail "the monitor does not answer"
    ceph-osd -i 0 -c "$conf" >>"$setup" 2>&1 </dev/null || fail "the OSD does not start"
    for tries in {1..100}; do
        ceph -c "$conf" --connect-timeout 20 osd dump 2>>"$setup" | grep -q '^osd.0 up' && break
        ((tries < 100)) || fail "the OSD does not come up"
        sleep 0.1
    done
    radosgw -n client.rgw -c "$conf" --rgw-frontends "beast endpoint=127.0.0.1:$port tcp_nodelay=1" \
        >>"$setup" 2>&1 </dev/null || fail "the gateway does not start"
    for tries in {1..600}; do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
        ((tries < 600)) || fail "nothing answers on $url after a minute"
        sleep 0.1
    done
    if [[ ! -e $dir/complete ]]; then
        make_users >>"$setup" 2>&1 || fail "the users could not be made"
        touch "$dir/complete"
    fi
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
