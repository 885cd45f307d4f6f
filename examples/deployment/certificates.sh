#!/usr/bin/env bash
# Certificates and keys for a try on one machine: an authority, a certificate of the server for localhost, and a pair of
# keys for each client. For a real federation, have your own authority sign a certificate with the server's name, and let
# every client make its own key, so that only the public half leaves its machine.
# examples/deployment/certificates.sh FOLDER NUMBER_OF_CLIENTS
set -euo pipefail
folder=${1:?the folder is missing} clients=${2:?the number of clients is missing}
mkdir -p "$folder/public"
cd "$folder"
curve=(-newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes)
openssl req -x509 "${curve[@]}" -days 30 -keyout ca.key -out ca.pem -subj "/CN=fedmoe_pl try" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" 2>openssl.log
openssl req "${curve[@]}" -keyout server.key -out server.csr -subj "/CN=localhost" 2>>openssl.log
# the server connects to itself at 127.0.0.1, whatever name the clients use
printf "subjectAltName=DNS:localhost,IP:127.0.0.1\nkeyUsage=digitalSignature\nextendedKeyUsage=serverAuth\n" >names
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile names -out server.pem \
    2>>openssl.log
for ((client = 0; client < clients; client++)); do
    rm -f "client_$client" "client_$client.pub" # ssh-keygen would ask
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "client $client" -f "client_$client"
    mv "client_$client.pub" public/
done
rm -f server.csr names openssl.log
chmod 600 ./*.key client_*
