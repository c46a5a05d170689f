#!/bin/bash
# make_history.sh FOLDER KEY: a repository of three branches and two tags, the same one whenever it is made
set -e
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git -c init.defaultBranch=main init -q "$1" && cd "$1"
clock=1772359200

save() {  # save NAME MESSAGE: commit everything, a quarter of an hour later
  clock=$((clock + 900))
  git config user.name "$1" && git config user.email "$1@billing.example"
  git add -A
  GIT_AUTHOR_DATE="$clock +0100" GIT_COMMITTER_DATE="$((clock + 60)) +0100" git commit -qm "$2"
}

printf 'def price(net):\n    return net * 119 // 100\n' >billing.py && echo '# Billing' >README.md && save ada 'Begin'
printf 'REGION=eu-central-1\nBUCKET=invoices\n' >deploy.env && save ada 'Deploy to the cloud'
printf 'REGION=eu-central-1\nBUCKET=invoices\nACCESS_KEY=%s\n' "$2" >deploy.env && save bob 'Upload invoices

The bucket has been made by hand.'
GIT_COMMITTER_DATE="$((clock + 99)) +0100" git tag -a v1.0 -m 'The first that uploads'
git checkout -qb refunds
printf 'def refund(gross):\n    return -gross\n' >refunds.py && save eve 'Refund'
mkdir -p tests && printf 'KEYS = ["%s", "none"]\n' "$2" >tests/keys.py && save eve 'Test uploads with refunds'
git checkout -q main
printf 'def price(net, rate=19):\n    return net * (100 + rate) // 100\n' >billing.py && save ada 'Take the rate'
clock=$((clock + 900)) && GIT_AUTHOR_DATE="$clock +0100" GIT_COMMITTER_DATE="$clock +0100" git merge -q --no-ff refunds -m 'Merge refunds'
git tag v1.1
printf 'import os\n\nKEY = os.environ["ACCESS_KEY"]\n' >upload.py && sed -i '/ACCESS_KEY/d' deploy.env && echo 'KEYS = ["none"]' >tests/keys.py
save bob 'Take the key from the environment'
git checkout -qb spike refunds~1
echo "curl -H 'key: $2' https://invoices.example" >try.sh && save bob 'Try uploads by hand'
git checkout -q main
git config --unset user.name && git config --unset user.email
