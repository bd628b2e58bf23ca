#!/bin/sh
# Installs Debian packages, or says how: packages.sh REASON PACKAGE...
set -eu
reason=$1
shift
install="apt-get update -qq && apt-get install -y -qq --no-install-recommends $*"
echo "setup: installing $*: $reason"
if [ "$(id -u)" = 0 ]; then
    DEBIAN_FRONTEND=noninteractive sh -c "$install" >/dev/null
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo DEBIAN_FRONTEND=noninteractive sh -c "$install" >/dev/null
else
    echo "setup: cannot install them as this user. Type this line, then try again:" >&2
    echo "    sudo sh -c '$install'" >&2
    exit 1
fi
