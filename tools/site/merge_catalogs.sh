#!/usr/bin/env bash
# `make zh`: bring docs/locale up to date with the English texts, and say what waits.
# $1: the folder in which Sphinx has written them, a NAME.pot for each page. $2: a page
# that is to be translated, such as docs/containers.
#
# A text that has changed keeps its Chinese, marked fuzzy, with the old English beside
# it; the site shows the new English. One that has moved takes its Chinese along. A page
# of which nearly nothing is translated has no catalog.
set -euo pipefail
command -v msgmerge >/dev/null || { echo "msgmerge is missing; on Debian: apt-get install gettext" >&2; exit 2; }
pots=$(cd "$1" && pwd) begun=${2:-}
cd "$(dirname "$0")/../../docs/locale/zh_CN/LC_MESSAGES"
known=$(mktemp)
trap 'rm -f "$known"' EXIT
find . -name '*.po' -print0 | xargs -0 msgcat --use-first -o "$known"

find . -name '*.po' | while read -r po; do
  [ -f "$pots/${po%.po}.pot" ] || { echo "removed: $po"; rm "$po"; }
done
(cd "$pots" && find . -name '*.pot') | sort | while read -r pot; do
  po=${pot%.pot}.po
  mkdir -p "$(dirname "$po")"
  [ -f "$po" ] || is_new=$po
  [ -f "$po" ] || msginit --no-translator --locale=zh_CN.UTF-8 --no-wrap -i "$pots/$pot" -o "$po" 2>/dev/null
  msgmerge --quiet --update --backup=none --previous --no-wrap --compendium="$known" "$po" "$pots/$pot"
  sed -i '/^#~|/d' "$po" # what an obsolete text was before: Babel, in Sphinx, cannot read it
  waits=$(LC_ALL=C msgfmt --statistics -o /dev/null "$po" 2>&1)
  has() { grep -oP "\d+(?= $1)" <<<"$waits" || echo 0; }
  if [ "${is_new:-}" = "$po" ] && [ "$po" != "./$begun.po" ] && (($(has translated) < $(has untranslated))); then
    rm "$po"
  elif (($(has fuzzy) + $(has untranslated))); then
    echo "$po: $waits"
  fi
done
find . -empty -type d -delete
