{{/* Rules that span several keys, which a JSON schema can't state with a message of use. */}}
{{- define "everwarm.validate" -}}
{{- include "everwarm.validateName" . -}}
{{- include "everwarm.validateGroups" . -}}
{{- include "everwarm.validateSecrets" . -}}
{{- include "everwarm.validateUpgrade" . -}}
{{- include "everwarm.validateFaultTolerance" . -}}
{{- include "everwarm.validateRest" . -}}
{{- end -}}

{{- define "everwarm.validateName" -}}
{{- $name := include "everwarm.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: the name %q must start with a letter and hold only lower-case letters, digits and dashes" $name) -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.validateGroups" -}}
{{- $groups := include "everwarm.groups" . | fromYaml -}}
{{- if not $groups -}}{{- fail "workerGroups: at least one group is needed; all are null" -}}{{- end -}}
{{- $roles := dict -}}
{{- $gpus := 0 -}}
{{- range $name, $group := $groups -}}
{{- $key := printf "workerGroups.%s" $name -}}
{{- $min := int (include "everwarm.groupMin" $group) -}}
{{- $max := int (include "everwarm.groupMax" $group) -}}
{{- if gt $min $max -}}{{- fail (printf "%s.minReplicas: %d is above maxReplicas, %d" $key $min $max) -}}{{- end -}}
{{- $n := int ($group.replicas | default $min) -}}
{{- if or (lt $n $min) (gt $n $max) -}}
{{- fail (printf "%s.replicas: %d is outside minReplicas..maxReplicas, %d..%d" $key $n $min $max) -}}
{{- end -}}
{{- if and (hasKey $group "idleTimeoutSeconds") (not $.Values.autoscaling.enabled) -}}
{{- fail (printf "%s.idleTimeoutSeconds: has an effect only with autoscaling.enabled=true" $key) -}}
{{- end -}}
{{- if lt (int ($group.terminationGracePeriodSeconds | default 1000000)) (int (include "everwarm.leaveSeconds" $)) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d does not cover app.drain_timeout_s + drain.replacementSeconds, %s" $key (int $group.terminationGracePeriodSeconds) (include "everwarm.leaveSeconds" $)) -}}
{{- end -}}
{{- $_ := set $roles ($group.role | default "any") true -}}
{{- if ne ($group.role | default "any") "router" -}}
{{- $gpus = add $gpus (mul $max (int ($group.gpus | default 0))) -}}
{{- end -}}
{{- end -}}
{{- if not (or $roles.any $roles.router) -}}{{- fail "workerGroups: no group has role router or any; the routers would have no place to run" -}}{{- end -}}
{{- if not (or $roles.any $roles.replica) -}}{{- fail "workerGroups: no group has role replica or any; the replicas would have no place to run" -}}{{- end -}}
{{- $device := .Values.app.device | default "auto" -}}
{{- if and (gt $gpus 0) (ne $device "cuda") -}}
{{- fail (printf "app.device: is %q, but a group for replicas has GPUs; set it to cuda (the head, which has no GPU, resolves auto)" $device) -}}
{{- end -}}
{{- if eq $device "cuda" -}}
{{- $each := .Values.app.replica_gpus | default 1 -}}
{{- if eq (toString $each) "auto" -}}{{- $each = 1 -}}{{- end -}}
{{- range $name := list "replicas" "max_replicas" -}}
{{- $n := index $.Values.app $name | default (eq $name "replicas" | ternary 2 0) -}}
{{- if gt (mulf $n $each) (float64 $gpus) -}}
{{- fail (printf "app.%s: %v replicas of %v GPU each need more than the %d GPUs that the worker groups reach at maxReplicas" $name $n $each (int $gpus)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.validateSecrets" -}}
{{- if not .Values.secrets.tokenPlane.existingSecret -}}
{{- fail "secrets.tokenPlane.existingSecret: is required; create one with: kubectl create secret generic everwarm-token-plane --from-literal=secret=$(openssl rand -hex 32)" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (not .Values.auth.enabled) -}}
{{- fail "auth.existingSecret: is set, but auth.enabled is false" -}}
{{- end -}}
{{- if and .Values.auth.enabled (semverCompare "<2.52.0-0" .Values.rayVersion) -}}
{{- fail (printf "rayVersion: token authentication (auth.enabled) needs 2.52.0 or later, not %s" .Values.rayVersion) -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.validateUpgrade" -}}
{{- with .Values.upgrade -}}
{{- if eq .type "NewClusterWithIncrementalUpgrade" -}}
{{- if not $.Values.autoscaling.enabled -}}{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade needs autoscaling.enabled=true" -}}{{- end -}}
{{- if not .incremental.gatewayClassName -}}{{- fail "upgrade.incremental.gatewayClassName: is required by upgrade.type NewClusterWithIncrementalUpgrade" -}}{{- end -}}
{{- if gt (int .incremental.stepSizePercent) (int .incremental.maxSurgePercent) -}}
{{- fail (printf "upgrade.incremental.stepSizePercent: %d is above maxSurgePercent, %d" (int .incremental.stepSizePercent) (int .incremental.maxSurgePercent)) -}}
{{- end -}}
{{- if eq $.Values.kind "RayCluster" -}}{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade exists only for kind RayService" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.validateFaultTolerance" -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if .enabled -}}
{{- if and (eq .backend "redis") (not .redisAddress) -}}{{- fail "gcsFaultTolerance.redisAddress: is required by backend redis" -}}{{- end -}}
{{- if and (eq .backend "redis") .storage -}}{{- fail "gcsFaultTolerance.storage: belongs to backend rocksdb, not redis" -}}{{- end -}}
{{- if and (eq .backend "rocksdb") (or .redisAddress .existingSecret .externalStorageNamespace) -}}
{{- fail "gcsFaultTolerance.backend: rocksdb takes no redisAddress, existingSecret or externalStorageNamespace" -}}
{{- end -}}
{{- if and .storage.claimName (or .storage.size .storage.storageClassName .storage.accessModes) -}}
{{- fail "gcsFaultTolerance.storage.claimName: excludes size, storageClassName and accessModes" -}}
{{- end -}}
{{- if and .usernameKey (not .existingSecret) -}}{{- fail "gcsFaultTolerance.usernameKey: needs existingSecret" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.validateRest" -}}
{{- if and (eq (.Values.app.metric_prefix | default "everwarm") "vllm") (or .Values.monitoring.prometheusRule.enabled .Values.monitoring.dashboard.enabled) -}}
{{- fail "app.metric_prefix: the chart's alerts and dashboard read the names with prefix everwarm" -}}
{{- end -}}
{{- range $key := list "router_resource" "replica_resource" "token_plane_ports" -}}
{{- if hasKey $.Values.app $key -}}
{{- fail (printf "app.%s: is set by the chart, from workerGroups.*.role and tokenPlane.ports" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "api_keys" "api_key_file" "api_key_env" -}}
{{- if hasKey $.Values.app $key -}}
{{- fail (printf "app.%s: API keys come from a Secret; name it in secrets.apiKeys.existingSecret" $key) -}}
{{- end -}}
{{- end -}}
{{- $low := include "everwarm.tokenPlaneLow" . | int -}}
{{- $high := include "everwarm.tokenPlaneHigh" . | int -}}
{{- if or (gt $low $high) (gt $high 65534) -}}
{{- fail (printf "tokenPlane.ports: %s is not a range of ports" .Values.tokenPlane.ports) -}}
{{- end -}}
{{- if and (le $low (int .Values.serve.port)) (ge $high (int .Values.serve.port)) -}}
{{- fail (printf "tokenPlane.ports: %s holds serve.port, %d" .Values.tokenPlane.ports (int .Values.serve.port)) -}}
{{- end -}}
{{- if and (eq .Values.modelCache.type "existingClaim") (not .Values.modelCache.existingClaim) -}}
{{- fail "modelCache.existingClaim: is required by modelCache.type existingClaim" -}}
{{- end -}}
{{- if and .Values.modelCache.existingClaim (ne .Values.modelCache.type "existingClaim") -}}
{{- fail (printf "modelCache.existingClaim: is set, but modelCache.type is %s" .Values.modelCache.type) -}}
{{- end -}}
{{- if and .Values.modelCache.readOnly (ne .Values.modelCache.type "existingClaim") -}}
{{- fail (printf "modelCache.readOnly: a volume of type %s starts empty; use existingClaim" .Values.modelCache.type) -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.parentRefs: at least one Gateway is needed" -}}{{- end -}}
{{- if and .Values.ingress.tlsSecret (not .Values.ingress.host) -}}{{- fail "ingress.host: is required by ingress.tlsSecret" -}}{{- end -}}
{{- if and .Values.modelCache.subPath (eq .Values.modelCache.type "emptyDir") -}}{{- fail "modelCache.subPath: has no meaning for an emptyDir" -}}{{- end -}}
{{- end -}}
